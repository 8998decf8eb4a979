"""Builds the argument parser of torch-ckpt.

Commands import the modules that they need only when they run, so ``--help`` and usage errors need
neither the engine nor torch.
"""

import argparse
import difflib
import math
import re
import shutil
import textwrap
from collections.abc import Callable

from torch_ckpt._base.paths import is_url
from torch_ckpt._base.version import __version__
from torch_ckpt.checkpoint.step_names import LARGEST_STEP
from torch_ckpt.cli import commands
from torch_ckpt.cli.completion import SHELLS, subcommands
from torch_ckpt.cli.exit_codes import ExitCode

Command = Callable[[argparse.Namespace], ExitCode]


# --- argument types: argparse prints the message of an ArgumentTypeError only --------------------


def _parse_renaming(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"must be OLD=NEW, got {text!r}")
    return old, new


def _parse_local_path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError(
            "must be a path, got an empty string; pass '.' for the current directory"
        )
    if is_url(text):
        raise argparse.ArgumentTypeError(
            "only steps, gc, delete, pin and unpin accept URLs; pass a local path without a "
            f"protocol, got {text}"
        )
    return text


def _parse_integer(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
    return number


def _parse_count(text: str) -> int:
    return _parse_integer(text, 0)


def _parse_positive_count(text: str) -> int:
    return _parse_integer(text, 1)


def _parse_step(text: str) -> int:
    number = _parse_integer(text, 0)
    if number > LARGEST_STEP:
        raise argparse.ArgumentTypeError(f"must be at most {LARGEST_STEP}, got {number}")
    return number


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGT]?)(i?)B?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 5GB or 512MiB, got {text!r}")
    number, prefix, is_binary = match.groups()
    step = 1024 if is_binary else 1000
    count = int(float(number) * step ** " KMGT".index(prefix.upper() or " "))
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 byte, got {text!r}")
    return count


def _parse_measured_size(text: str) -> int:
    from torch_ckpt.cli.doctor import LEAST_BYTES

    count = _parse_size(text)
    if count < LEAST_BYTES:
        raise argparse.ArgumentTypeError(f"must be at least {LEAST_BYTES} bytes, got {text!r}")
    return count


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _parse_positive_number(text: str) -> float:
    number = _parse_number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text!r}")
    return number


def _parse_tolerance(text: str) -> float:
    number = _parse_number(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text!r}")
    return number


# --- the command line ----------------------------------------------------------------------------


_PURPOSE = (
    "Inspect, verify, convert and delete PyTorch checkpoints written by torch_ckpt or "
    "torch.distributed.checkpoint."
)

# Commands for a first look, with descriptions.
_EXAMPLES = (
    ("torch-ckpt steps checkpoints", "list the steps of a run"),
    ("torch-ckpt ls checkpoints/400", "list the tensors and objects of step 400"),
    ("torch-ckpt verify checkpoints", "check the newest step against its checksums"),
    ("torch-ckpt diff checkpoints/300 checkpoints/400", "compare two steps by value"),
    (
        "torch-ckpt convert checkpoints/400 model.safetensors --tensors-only",
        "export the tensors of a step",
    ),
)

_CHECKPOINT = "a checkpoint directory, ROOT/40 for step 40 of a run, or ROOT for its newest step"


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=_parse_local_path, metavar="DIR", help=_CHECKPOINT)


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "root", metavar="ROOT", help="the root directory of a run, or its URL (fsspec)"
    )


def _add_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a name, a prefix of dotted names, or a pattern such as 'model.*' "
        "(default: all names)",
    )


def _add_steps(parser: argparse.ArgumentParser) -> None:
    _add_root(parser)
    parser.add_argument("steps", nargs="+", type=_parse_step, metavar="STEP", help="a step number")


def _add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _add_allow_pickle(parser: argparse.ArgumentParser, metavar: str) -> None:
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help=f"unpickle every object in {metavar}; this may run arbitrary code, so use it only if "
        "you trust the writer",
    )


def _help_width() -> int:
    return shutil.get_terminal_size().columns - 2  # as argparse does


def _describe_exit_code(code: ExitCode) -> str:
    return textwrap.fill(
        code.meaning,
        _help_width(),
        initial_indent=f"{code.value:>5}  ",
        subsequent_indent=" " * 7,
    )


def overview() -> str:
    """Describes torch-ckpt to a newcomer: what it is for, examples, and how to get help."""
    examples = "".join(f"  # {what}\n  {command}\n\n" for command, what in _EXAMPLES)
    purpose = (
        "torch-ckpt inspects, verifies, converts and deletes PyTorch checkpoints written by "
        "torch_ckpt or torch.distributed.checkpoint."
    )
    return (
        f"{textwrap.fill(purpose, _help_width())}\n\n"
        f"{examples}"
        "All commands:    torch-ckpt --help\n"
        "One command:     torch-ckpt verify --help\n"
        "Documentation:   docs/cli.md\n"
    )


def suggest_command(parser: argparse.ArgumentParser, name: str) -> str:
    """Explains that a command does not exist and names the closest one; "" if it exists."""
    names = subcommands(parser)
    if name.startswith("-") or name in names:
        return ""
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "torch-ckpt --help lists the commands"
    return f"unknown command {name!r}; {hint}"


def suggest_option(command: argparse.ArgumentParser, word: str) -> str:
    """Suggests the option that is closest to a misspelled one; "" if none is close."""
    if not word.startswith("--"):
        return ""
    options = [option[2:] for action in command._actions for option in action.option_strings]
    close = difflib.get_close_matches(word[2:].partition("=")[0], options, n=1)
    return f"; did you mean --{close[0]}?" if close else ""


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser. Each command is a subparser whose default ``run`` is its function."""
    parser = argparse.ArgumentParser(
        prog="torch-ckpt",
        description=textwrap.fill(_PURPOSE, _help_width()),
        epilog="\n".join(["exit codes:", *map(_describe_exit_code, ExitCode)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torch_ckpt {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add_command(
        name: str, run: Command, help: str, description: str
    ) -> argparse.ArgumentParser:
        subparser = subparsers.add_parser(name, help=help, description=description)
        subparser.set_defaults(run=run, command=subparser)
        return subparser

    steps = add_command(
        "steps",
        commands.list_steps,
        help="list the steps of a run",
        description="List the steps that CheckpointManager saved in ROOT, with their size, age, "
        "metrics and pins, and the leftovers of unfinished saves and deletions. Exits with 2 if "
        "there are no steps.",
    )
    _add_root(steps)
    _add_json(steps)

    ls = add_command(
        "ls",
        commands.list_checkpoint,
        help="list the tensors and objects of a checkpoint",
        description="List the tensors and objects of a checkpoint. Reads the metadata and the file "
        "lengths, not the data. Exits with 1 if a data file or a shard is missing or a file is too "
        "short, and with 2 if the checkpoint cannot be read or no name matches.",
    )
    _add_directory(ls)
    _add_names(ls)
    group = ls.add_mutually_exclusive_group()
    group.add_argument("--files", action="store_true", help="list files instead of items")
    _add_json(group)

    show = add_command(
        "show",
        commands.show_checkpoint,
        help="show values, statistics and file locations of tensors and objects",
        description="Read tensors and objects from a checkpoint. Show shape, dtype, first values, "
        "minimum, maximum, mean, standard deviation, the number of zeros, NaNs and infinities, and "
        "file locations. Exits with 1 if any of them are damaged (listed after the intact ones), "
        "and with 2 if no name matches or nothing can be read.",
    )
    _add_directory(show)
    _add_names(show)
    show.add_argument(
        "--first",
        type=_parse_count,
        default=6,
        metavar="N",
        help="number of values to show (default: 6)",
    )
    _add_allow_pickle(show, "DIR")
    _add_json(show)

    verify = add_command(
        "verify",
        commands.verify_checkpoint,
        help="read an entire checkpoint and check it against its checksums",
        description="Read every record of a checkpoint, check it against all its checksums, and "
        "list everything that is damaged or missing. Exits with 0 if the checkpoint is intact, "
        "with 1 if anything is damaged or missing, and with 2 if the checkpoint cannot be read, or "
        "if no damage was found but part of it could not be read.",
    )
    _add_directory(verify)
    verify.add_argument(
        "--threads", type=_parse_positive_count, metavar="N", help="concurrent reads (default: 8)"
    )
    group = verify.add_mutually_exclusive_group()
    _add_json(group)
    group.add_argument("--quiet", action="store_true", help="print only problems")

    diff = add_command(
        "diff",
        commands.diff_checkpoints,
        help="compare two checkpoints by name, shape, dtype and value",
        description="Compare two checkpoints; their sharding may differ. Objects are compared by "
        "their stored bytes and never unpickled. Exits with 0 if the checkpoints are equal (within "
        "the tolerances, if given), with 1 if they differ, and with 2 if one cannot be read.",
    )
    diff.add_argument("a", type=_parse_local_path, metavar="A", help=_CHECKPOINT)
    diff.add_argument("b", type=_parse_local_path, metavar="B", help="the other checkpoint")
    _add_names(diff)
    diff.add_argument(
        "--atol",
        type=_parse_tolerance,
        metavar="X",
        help="treat values with |a - b| <= X + Y * |b| as equal",
    )
    diff.add_argument("--rtol", type=_parse_tolerance, metavar="Y", help="see --atol")
    group = diff.add_mutually_exclusive_group()
    _add_json(group)
    group.add_argument(
        "--quiet", action="store_true", help="print nothing if the checkpoints are equal"
    )

    explain = add_command(
        "explain",
        commands.explain_checkpoint,
        help="show what each rank wrote and how long it took",
        description="Show what each rank wrote and, if the metadata records it, how long the rank "
        "took. Name the ranks that stand out. Reads only the metadata. Exits with 2 if the "
        "checkpoint cannot be read.",
    )
    _add_directory(explain)
    _add_json(explain)

    convert = add_command(
        "convert",
        commands.convert_checkpoint,
        help="convert between checkpoint directories, torch.save files and safetensors",
        description="Convert a model, a few tensors at a time. SOURCE is a checkpoint directory, a "
        "torch.save file, a safetensors file, or a directory of safetensors files with an index. "
        "The name of TARGET selects its format: *.safetensors for safetensors; *.pt, *.pth or "
        "*.bin for torch.save. Any other name selects a checkpoint directory or, with "
        "--max-shard-size or --config, a directory of safetensors files. Exits with 2 if the "
        "conversion fails; an existing TARGET is then kept, and a new one is removed.",
    )
    convert.add_argument(
        "source", type=_parse_local_path, metavar="SOURCE", help="the model to convert"
    )
    convert.add_argument(
        "target", type=_parse_local_path, metavar="TARGET", help="the path to write to"
    )
    convert.add_argument(
        "--select",
        action="append",
        metavar="PATTERN",
        help="convert only names that match PATTERN, such as 'model.*'; repeatable",
    )
    convert.add_argument(
        "--strip-prefix", metavar="PREFIX", help="remove PREFIX from names that begin with it"
    )
    convert.add_argument(
        "--rename",
        action="append",
        type=_parse_renaming,
        metavar="OLD=NEW",
        help="rename OLD to NEW, after --strip-prefix; each * in NEW stands for the text that the "
        "corresponding * in OLD matched; repeatable, and the first matching rule applies",
    )
    convert.add_argument(
        "--dtype", metavar="DTYPE", help="dtype for floating-point tensors: bf16, fp16, fp32, ..."
    )
    convert.add_argument(
        "--config",
        type=_parse_local_path,
        metavar="PATH",
        help="copy this config.json (or the one in this directory) next to the safetensors files, "
        "so that transformers can load TARGET; --dtype is recorded in the copy; each file holds at "
        "most 5 GB unless --max-shard-size is given",
    )
    convert.add_argument(
        "--max-shard-size",
        type=_parse_size,
        metavar="SIZE",
        help="maximum size of the tensors in each file, such as 5GB or 512MiB",
    )
    convert.add_argument(
        "--tensors-only", action="store_true", help="leave out values that are not tensors"
    )
    convert.add_argument("--overwrite", action="store_true", help="replace an existing TARGET")
    _add_allow_pickle(convert, "SOURCE")
    _add_json(convert)

    gc = add_command(
        "gc",
        commands.collect_steps,
        help="delete the steps of a run that no retention rule keeps",
        description="Delete the complete steps in ROOT that no retention rule keeps. A step is "
        "kept if any rule keeps it; the newest step and pinned steps are always kept. If ROOT is a "
        "directory, a step that is being loaded is kept, and the exit code is 1. If ROOT is a URL, "
        "loads cannot be detected: the step is deleted, and the load fails. Exits with 2 if there "
        "are no steps.",
    )
    _add_root(gc)
    gc.add_argument(
        "--keep-last", type=_parse_positive_count, metavar="N", help="keep the newest N steps"
    )
    gc.add_argument(
        "--keep-every",
        type=_parse_positive_count,
        metavar="K",
        help="keep steps whose number is a multiple of K",
    )
    gc.add_argument(
        "--keep-every-hours",
        type=_parse_positive_number,
        metavar="T",
        help="keep one step for every T hours",
    )
    gc.add_argument(
        "--keep-best",
        type=_parse_positive_count,
        metavar="M",
        help="keep the M best steps by --metric",
    )
    gc.add_argument("--metric", metavar="NAME", help="the metric for --keep-best")
    gc.add_argument(
        "--mode",
        choices=("min", "max"),
        default="min",
        help="whether the lowest or the highest value of the metric is best (default: min)",
    )
    gc.add_argument(
        "--sweep",
        action="store_true",
        help="also delete leftovers that no process is using; for a URL, only those older than an "
        "hour",
    )
    gc.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    _add_json(gc)

    delete = add_command(
        "delete",
        commands.delete_steps,
        help="delete steps of a run by number",
        description="Delete complete steps in ROOT: all the given steps, or none if one is "
        "refused. Pinned steps, steps that are being saved and, without --force, the newest step "
        "are refused. If ROOT is a directory, a step that is being loaded is kept, and the exit "
        "code is 1. Exits with 2 if a step is refused.",
    )
    _add_steps(delete)
    delete.add_argument("--force", action="store_true", help="allow deleting the newest step")
    _add_json(delete)

    for name, is_pinned, help in (
        ("pin", True, "protect steps of a run from deletion"),
        ("unpin", False, "remove the protection of pinned steps"),
    ):
        description = f"{help.capitalize()}. Exits with 2 if any of the steps does not exist."
        pin = add_command(name, commands.pin_steps, help=help, description=description)
        pin.set_defaults(is_pinned=is_pinned)
        _add_steps(pin)
        _add_json(pin)

    doctor = add_command(
        "doctor",
        commands.examine_directory,
        help="measure a directory's file system and check what saves rely on",
        description="Examine a directory: file system, free space, direct I/O, fsync latency, file "
        "locks, and the bandwidth of saves and loads with 1 to 8 threads. Recommend options, and "
        "check the assumptions that durability depends on. Deletes its own files afterwards. Exits "
        "with 1 if an assumption does not hold, and with 2 if the directory is not writable.",
    )
    doctor.add_argument(
        "directory", type=_parse_local_path, metavar="PATH", help="an existing directory"
    )
    doctor.add_argument(
        "--size",
        type=_parse_measured_size,
        metavar="SIZE",
        help="amount of data for each measurement (default: 256MiB)",
    )
    _add_json(doctor)

    completion = add_command(
        "completion",
        commands.print_completion,
        help="print a tab completion script",
        description="Print a completion script. For bash, add this line to ~/.bashrc: "
        'eval "$(torch-ckpt completion bash)". For zsh, add this line to ~/.zshrc, after compinit: '
        'eval "$(torch-ckpt completion zsh)". For fish, run: torch-ckpt completion fish > '
        "~/.config/fish/completions/torch-ckpt.fish",
    )
    completion.add_argument("shell", choices=SHELLS, help="the shell")
    completion.set_defaults(parser=parser)
    return parser
