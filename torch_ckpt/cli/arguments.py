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

from torch_ckpt._base.formatting import plural
from torch_ckpt._base.system import is_url
from torch_ckpt._base.version import __version__
from torch_ckpt.checkpoint.marker import LARGEST_STEP
from torch_ckpt.cli import commands
from torch_ckpt.cli.output import ExitCode

Command = Callable[[argparse.Namespace], ExitCode]

_AddCommand = Callable[[str, Command], argparse.ArgumentParser]


# --- argument types: argparse prints the message of an ArgumentTypeError only --------------------


def _parse_renaming(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"must be OLD=NEW, got {text!r}")
    return old, new


def _parse_path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError(
            "must be a path, got an empty string; pass '.' for the current directory"
        )
    return text


def _parse_local_path(text: str) -> str:
    if is_url(text):
        from torch_ckpt.stores.urls import safe_url

        raise argparse.ArgumentTypeError(
            f"must be a local path, without a protocol, got {safe_url(text)}"
        )
    return _parse_path(text)


def _integer(least: int, most: float = math.inf) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if not least <= number <= most:
            limit = f"at least {least}" if number < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"must be {limit}, got {number}")
        return number

    return parse


def _number(is_allowed: Callable[[float], bool], requirement: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not is_allowed(number):
            raise argparse.ArgumentTypeError(f"must be {requirement}, got {text!r}")
        return number

    return parse


def _size(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGT]?)(i?)B?", text)
        if match is None:
            raise argparse.ArgumentTypeError(f"must be a size such as 5GB or 512MiB, got {text!r}")
        number, prefix, is_binary = match.groups()
        step = 1024 if is_binary else 1000
        count = int(float(number) * step ** " KMGT".index(prefix.upper() or " "))
        if count < least:
            raise argparse.ArgumentTypeError(
                f"must be at least {plural(least, 'byte')}, got {text!r}"
            )
        return count

    return parse


def _parse_measured_size(text: str) -> int:
    from torch_ckpt.cli.doctor import LEAST_MEASURED

    return _size(LEAST_MEASURED)(text)


_TOLERANCE = _number(lambda number: number >= 0, "at least 0")
_HOURS = _number(lambda number: 0 < number < math.inf, "positive and finite")


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

_CHECKPOINT = (
    "a checkpoint directory, ROOT/40 for step 40 of a run, ROOT for its newest step, or a "
    "safetensors file or a directory of such files; or the URL of one of these"
)


def _value(
    parser: argparse._ActionsContainer,
    name: str,
    metavar: str,
    type: Callable[[str], object],
    help: str,
    *,
    nargs: str | None = None,
    action: str = "store",
    default: object = None,
) -> None:
    parser.add_argument(
        name, metavar=metavar, type=type, help=help, nargs=nargs, action=action, default=default
    )


def _flag(parser: argparse._ActionsContainer, name: str, help: str) -> None:
    parser.add_argument(name, action="store_true", help=help)


def _add_directory(parser: argparse.ArgumentParser) -> None:
    _value(parser, "directory", "DIR", _parse_path, _CHECKPOINT)


def _add_root(parser: argparse.ArgumentParser) -> None:
    _value(parser, "root", "ROOT", _parse_path, "the root directory of a run, or its URL (fsspec)")


def _add_names(parser: argparse.ArgumentParser) -> None:
    help = "a name, a prefix of dotted names, or a pattern such as 'model.*' (default: all names)"
    _value(parser, "names", "NAME", str, help, nargs="*")


def _add_steps(parser: argparse.ArgumentParser) -> None:
    _add_root(parser)
    _value(parser, "steps", "STEP", _integer(0, LARGEST_STEP), "a step number", nargs="+")


def _add_json(parser: argparse._ActionsContainer) -> None:
    _flag(parser, "--json", "print one JSON document")


def _add_json_or(parser: argparse.ArgumentParser, option: str, help: str) -> None:
    """Adds --json and an option that excludes it."""
    group = parser.add_mutually_exclusive_group()
    _add_json(group)
    _flag(group, option, help)


def _add_allow_pickle(parser: argparse.ArgumentParser, metavar: str) -> None:
    _flag(
        parser,
        "--allow-pickle",
        f"unpickle every object in {metavar}; this may run arbitrary code, so use it only if you "
        "trust the writer",
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


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the parser of each command, by name."""
    [of_commands] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(of_commands.choices)


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
    """Builds the parser. Each command is a subparser whose default ``run`` is its function.

    The function's docstring is the command's help (first line) and description.
    """
    parser = argparse.ArgumentParser(
        prog="torch-ckpt",
        description=textwrap.fill(_PURPOSE, _help_width()),
        epilog="\n".join(["exit codes:", *map(_describe_exit_code, ExitCode)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torch_ckpt {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add_command(name: str, run: Command) -> argparse.ArgumentParser:
        summary, _, description = (run.__doc__ or "").partition("\n\n")
        help = f"{summary[:1].lower()}{summary[1:].rstrip('.')}"
        command = subparsers.add_parser(name, help=help, description=description)
        command.set_defaults(run=run, command=command)
        return command

    _add_inspection(add_command)
    _add_convert(add_command)
    _add_apply(add_command)
    _add_deletion(add_command)
    _add_machine(add_command)
    return parser


def _add_inspection(add_command: _AddCommand) -> None:
    steps = add_command("steps", commands.list_steps)
    _add_root(steps)
    _add_json(steps)

    ls = add_command("ls", commands.list_checkpoint)
    _add_directory(ls)
    _add_names(ls)
    group = ls.add_mutually_exclusive_group()
    _flag(group, "--files", "list files instead of items")
    _add_json(group)

    show = add_command("show", commands.show_checkpoint)
    _add_directory(show)
    _add_names(show)
    _value(show, "--first", "N", _integer(0), "number of values to show (default: 6)", default=6)
    _add_allow_pickle(show, "DIR")
    _add_json(show)

    verify = add_command("verify", commands.verify_checkpoint)
    _add_directory(verify)
    _value(verify, "--threads", "N", _integer(1), "concurrent reads (default: 8)")
    _add_json_or(verify, "--quiet", "print only problems")

    diff = add_command("diff", commands.diff_checkpoints)
    _value(diff, "a", "A", _parse_path, _CHECKPOINT)
    _value(diff, "b", "B", _parse_path, "the other checkpoint")
    _add_names(diff)
    atol_help = "treat values with |a - b| <= X + Y * |b| as equal"
    _value(diff, "--atol", "X", _TOLERANCE, atol_help)
    _value(diff, "--rtol", "Y", _TOLERANCE, "see --atol")
    _add_json_or(diff, "--quiet", "print nothing if the checkpoints are equal")


def _add_convert(add_command: _AddCommand) -> None:
    convert = add_command("convert", commands.convert_checkpoint)
    _value(convert, "source", "SOURCE", _parse_path, "the model to convert")
    _value(convert, "target", "TARGET", _parse_path, "the path or URL to write to")
    select = "convert only names that match PATTERN, such as 'model.*'; repeatable"
    _value(convert, "--select", "PATTERN", str, select, action="append")
    prefix = "remove PREFIX from names that begin with it"
    _value(convert, "--strip-prefix", "PREFIX", str, prefix)
    rename = (
        "rename OLD to NEW, after --strip-prefix; each * in NEW stands for the text that the "
        "corresponding * in OLD matched; repeatable, and the first matching rule applies"
    )
    _value(convert, "--rename", "OLD=NEW", _parse_renaming, rename, action="append")
    dtype = "dtype for floating-point tensors: bf16, fp16, fp32, ..."
    _value(convert, "--dtype", "DTYPE", str, dtype)
    config = (
        "copy this config.json (or the one in this directory) next to the safetensors files, so "
        "that transformers can load TARGET; --dtype is recorded in the copy; each file holds at "
        "most 5 GB unless --max-shard-size is given"
    )
    _value(convert, "--config", "PATH", _parse_local_path, config)
    shard_size = "maximum size of the tensors in each file, such as 5GB or 512MiB"
    _value(convert, "--max-shard-size", "SIZE", _size(1), shard_size)
    _flag(convert, "--tensors-only", "leave out values that are not tensors")
    _flag(convert, "--overwrite", "replace an existing TARGET")
    _add_allow_pickle(convert, "SOURCE")
    _add_json(convert)


def _add_apply(add_command: _AddCommand) -> None:
    apply = add_command("apply", commands.apply_delta)
    delta = "the delta, or the directory of the version that contains it"
    _value(apply, "delta", "DELTA", _parse_local_path, delta)
    base = "the directory of safetensors files to change"
    _value(apply, "directory", "DIR", _parse_local_path, base)
    out = "write the new version to OUT, and keep DIR"
    _value(apply, "--out", "OUT", _parse_local_path, out)


def _add_deletion(add_command: _AddCommand) -> None:
    gc = add_command("gc", commands.collect_steps)
    _add_root(gc)
    _value(gc, "--keep-last", "N", _integer(1), "keep the newest N steps")
    _value(gc, "--keep-every", "K", _integer(1), "keep steps whose number is a multiple of K")
    _value(gc, "--keep-every-hours", "T", _HOURS, "keep one step for every T hours")
    _value(gc, "--keep-best", "M", _integer(1), "keep the M best steps by --metric")
    _value(gc, "--metric", "NAME", str, "the metric for --keep-best")
    gc.add_argument(
        "--mode",
        choices=("min", "max"),
        default="min",
        help="whether the lowest or the highest value of the metric is best (default: min)",
    )
    _flag(
        gc,
        "--sweep",
        "also delete leftovers that no process is using; for a URL, only those older than an hour",
    )
    _flag(gc, "--dry-run", "only print what would be deleted")
    _add_json(gc)

    delete = add_command("delete", commands.delete_steps)
    _add_steps(delete)
    _flag(delete, "--force", "allow deleting the newest step")
    _add_json(delete)

    for name, run in (("pin", commands.pin_steps), ("unpin", commands.unpin_steps)):
        pin = add_command(name, run)
        _add_steps(pin)
        _add_json(pin)


def _add_machine(add_command: _AddCommand) -> None:
    doctor = add_command("doctor", commands.examine_directory)
    _value(doctor, "directory", "PATH", _parse_path, "an existing directory, or a URL")
    size_help = "amount of data for each measurement (default: 256MiB; for a URL, 32MiB)"
    _value(doctor, "--size", "SIZE", _parse_measured_size, size_help)
    _add_json(doctor)
