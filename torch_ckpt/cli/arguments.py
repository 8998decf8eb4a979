"""The arguments of torch-ckpt."""

import argparse
import math
import re
from collections.abc import Callable

from torch_ckpt._base.paths import is_url
from torch_ckpt._base.version import __version__
from torch_ckpt.cli.commands import (
    collect_steps,
    convert_checkpoint,
    delete_steps,
    diff_checkpoints,
    examine_directory,
    explain_checkpoint,
    list_checkpoint,
    list_steps,
    pin_step,
    show_checkpoint,
    verify_checkpoint,
)
from torch_ckpt.cli.doctor import DEFAULT_BYTES, LEAST_BYTES
from torch_ckpt.steps import LARGEST_STEP

Run = Callable[[argparse.Namespace], int]


def _renaming(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"must be OLD=NEW, got {text!r}")
    return old, new


# --- types of arguments: argparse prints what ArgumentTypeError says, and nothing of others ------


def _local(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError(
            "must name a path, got an empty text (the current directory is '.')"
        )
    if is_url(text):
        raise argparse.ArgumentTypeError(
            "only steps, gc, delete, pin and unpin take URLs, and a local path has no protocol: "
            f"{text}"
        )
    return text


def _integer(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
    return number


def _count(text: str) -> int:
    return _integer(text, 0)


def _step(text: str) -> int:
    number = _integer(text, 0)
    if number > LARGEST_STEP:
        raise argparse.ArgumentTypeError(f"must be at most {LARGEST_STEP}, got {number}")
    return number


def _at_least_one(text: str) -> int:
    return _integer(text, 1)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGT]?)(i?)B?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 5GB or 512MiB, got {text!r}")
    number, prefix, is_binary = match.groups()
    step = 1024 if is_binary else 1000
    count = int(float(number) * step ** " KMGT".index(prefix.upper() or " "))
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 byte, got {text!r}")
    return count


def _probed_bytes(text: str) -> int:
    count = _bytes(text)
    if count < LEAST_BYTES:
        raise argparse.ArgumentTypeError(f"must be at least {LEAST_BYTES} bytes, got {text!r}")
    return count


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _positive(text: str) -> float:
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text!r}")
    return number


def _tolerance(text: str) -> float:
    number = _number(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text!r}")
    return number


# --- the command line ----------------------------------------------------------------------------


_CHECKPOINT = "a checkpoint directory, ROOT/40 for step 40 of a run, or ROOT for its newest step"


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        type=_local,
        metavar="DIR",
        help=_CHECKPOINT,
    )


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", metavar="ROOT", help="a directory, or a URL that fsspec knows")


def _add_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a name, its beginning up to a dot, or a pattern as 'model.*'; default: all",
    )


def _add_steps(parser: argparse.ArgumentParser) -> None:
    _add_root(parser)
    parser.add_argument("steps", nargs="+", type=_step, metavar="STEP", help="a step's number")


def _add_json(parser: argparse._ActionsContainer, what: str = "everything") -> None:
    parser.add_argument("--json", action="store_true", help=f"{what} as one JSON document")


def parser_of_all() -> argparse.ArgumentParser:
    """Builds the command line; a command is a subparser with its function as the default `run`."""
    parser = argparse.ArgumentParser(
        prog="torch-ckpt",
        description="Look at, convert and keep checkpoints of torch_ckpt and of stock PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"torch_ckpt {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Run, help: str, description: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=description)
        made.set_defaults(run=run)
        return made

    ls = command(
        "ls",
        list_checkpoint,
        help="list what a checkpoint holds",
        description="List the tensors and objects of a checkpoint directory. Reads its metadata "
        "and the lengths of its files, not the data. Exits with 1 when a data file or a shard is "
        "missing or a file is too short, with 2 when there is no checkpoint that can be read, or "
        "no such name.",
    )
    _add_directory(ls)
    _add_names(ls)
    form = ls.add_mutually_exclusive_group()
    form.add_argument("--files", action="store_true", help="one line per file instead of per item")
    _add_json(form)

    why = command(
        "explain",
        explain_checkpoint,
        help="say who wrote what of a checkpoint, and what took long",
        description="Say for each rank what it wrote of a checkpoint directory and how long it "
        "took, as far as the metadata tells, and what stands out. Reads the metadata alone. Exits "
        "with 2 when there is no checkpoint that can be read.",
    )
    _add_directory(why)
    _add_json(why)

    look = command(
        "show",
        show_checkpoint,
        help="show what tensors and objects hold: values, statistics, places",
        description="Read tensors and objects of a checkpoint directory, and show their shape and "
        "dtype, the first values, minimum, maximum, mean and standard deviation, zeros, NaN and "
        "infinite values, and where they are stored. Exits with 1 when some are damaged, which are "
        "named behind the sound ones, with 2 when there is no such name, or nothing can be read.",
    )
    _add_directory(look)
    _add_names(look)
    look.add_argument(
        "--first", type=_count, default=6, metavar="N", help="first values to show (default: 6)"
    )
    look.add_argument(
        "--allow-pickle",
        action="store_true",
        help="unpickle whatever DIR holds, which may run code: only from trusted writers",
    )
    _add_json(look)

    check = command(
        "verify",
        verify_checkpoint,
        help="read all of a checkpoint and compare it with its checksums",
        description="Read every record of a checkpoint directory, compare it with every checksum "
        "that there is, and name all that is damaged or missing. Exits with 0 when all is sound, "
        "with 1 when something is damaged or missing, with 2 when there is no checkpoint that can "
        "be read, or the machine did not let all of it be read.",
    )
    _add_directory(check)
    check.add_argument(
        "--threads", type=_at_least_one, metavar="N", help="reads under way at once (default: 8)"
    )
    shape = check.add_mutually_exclusive_group()
    _add_json(shape)
    shape.add_argument("--quiet", action="store_true", help="say only what is wrong")

    compare = command(
        "diff",
        diff_checkpoints,
        help="compare two checkpoints by name, shape, dtype and value",
        description="Compare two checkpoint directories, however each is sharded. Objects are "
        "compared by their stored bytes and never unpickled. Exits with 0 when they are equal, or "
        "within the tolerances if some are given, with 1 when they differ, with 2 when one cannot "
        "be read.",
    )
    compare.add_argument("a", type=_local, metavar="A", help=_CHECKPOINT)
    compare.add_argument("b", type=_local, metavar="B", help="another")
    _add_names(compare)
    compare.add_argument(
        "--atol", type=_tolerance, metavar="X", help="allow |a - b| <= X + Y * |b|"
    )
    compare.add_argument("--rtol", type=_tolerance, metavar="Y", help="see --atol")
    form = compare.add_mutually_exclusive_group()
    _add_json(form)
    form.add_argument("--quiet", action="store_true", help="print nothing if they are equal")

    change = command(
        "convert",
        convert_checkpoint,
        help="convert between checkpoint directories, torch.save files and safetensors",
        description="Convert a model, a few tensors at a time. SOURCE: a checkpoint directory, a "
        "file of torch.save, a safetensors file, or a directory of these with an index. TARGET: "
        "*.safetensors; *.pt, *.pth or *.bin for torch.save; else a checkpoint directory, or, with "
        "--max-shard-size or --config, a directory of safetensors files. Exits with 2 when it "
        "cannot be converted; then nothing is left of the target.",
    )
    change.add_argument("source", type=_local, metavar="SOURCE", help="what to convert")
    change.add_argument("target", type=_local, metavar="TARGET", help="what to make of it")
    change.add_argument(
        "--select",
        action="append",
        metavar="PATTERN",
        help="take only the names that match, as 'model.*'; may be given several times",
    )
    change.add_argument(
        "--strip-prefix", metavar="PREFIX", help="take PREFIX away from names that begin with it"
    )
    change.add_argument(
        "--rename",
        action="append",
        type=_renaming,
        metavar="OLD=NEW",
        help="give what is left of a name another one; a * in NEW stands for what the one at its "
        "place in OLD matches; may be given several times, the first that matches counts",
    )
    change.add_argument(
        "--dtype", metavar="DTYPE", help="of floating point tensors: bf16, fp16, fp32, ..."
    )
    change.add_argument(
        "--config",
        type=_local,
        metavar="PATH",
        help="a config.json, or a directory with one, to put beside safetensors files (of 5 GB "
        "unless --max-shard-size is given), so that transformers loads TARGET; with --dtype in it",
    )
    change.add_argument(
        "--max-shard-size",
        type=_bytes,
        metavar="SIZE",
        help="most bytes of tensors in each file (5GB, 512MiB)",
    )
    change.add_argument("--tensors-only", action="store_true", help="leave out all but tensors")
    change.add_argument("--overwrite", action="store_true", help="replace what is at TARGET")
    change.add_argument(
        "--allow-pickle",
        action="store_true",
        help="unpickle whatever SOURCE holds, which may run code: only from trusted writers",
    )
    _add_json(change, "the report")

    probe = command(
        "doctor",
        examine_directory,
        help="probe a directory: its file system, speed, and what is promised there",
        description="Probe a directory: file system, space, direct I/O, the cost of fsync, locks, "
        "and the bandwidth of saves and loads with 1 to 8 threads; then say which options suit it, "
        "and which of the assumptions hold that durability rests on. Its files are removed. Exits "
        "with 1 when an assumption does not hold, with 2 when the directory cannot be written to.",
    )
    probe.add_argument("directory", type=_local, metavar="PATH", help="a directory that is there")
    probe.add_argument(
        "--size",
        type=_probed_bytes,
        default=DEFAULT_BYTES,
        metavar="SIZE",
        help="bytes of each measurement (default: 256MiB)",
    )
    _add_json(probe)

    steps = command(
        "steps",
        list_steps,
        help="list the steps of a run",
        description="List the steps beneath a root, as CheckpointManager saves them: size, age, "
        "metrics, whether pinned; and leftovers of saves and deletions that did not end. Exits "
        "with 2 when there are none.",
    )
    _add_root(steps)
    _add_json(steps)

    gc = command(
        "gc",
        collect_steps,
        help="delete steps of a run that no rule keeps",
        description="Delete the complete steps beneath a root that no rule keeps. Rules add up. "
        "The newest step and pinned ones always stay, and so does what is being loaded from a "
        "directory: then the exit code is 1. Of a URL nobody knows who loads a step: it goes, and "
        "the load fails. Exits with 2 when there are no steps.",
    )
    _add_root(gc)
    gc.add_argument("--keep-last", type=_at_least_one, metavar="N", help="keep the newest N")
    gc.add_argument(
        "--keep-every", type=_at_least_one, metavar="K", help="keep multiples of K steps"
    )
    gc.add_argument("--keep-every-hours", type=_positive, metavar="T", help="keep one each T hours")
    gc.add_argument(
        "--keep-best", type=_at_least_one, metavar="M", help="keep the best M by --metric"
    )
    gc.add_argument("--metric", metavar="NAME", help="the metric of --keep-best")
    gc.add_argument(
        "--mode", choices=("min", "max"), default="min", help="what is best (default: min)"
    )
    gc.add_argument(
        "--sweep",
        action="store_true",
        help="also remove leftovers that nobody works in; of a URL, those older than an hour",
    )
    gc.add_argument("--dry-run", action="store_true", help="only say what would happen")
    _add_json(gc, "the report")

    gone = command(
        "delete",
        delete_steps,
        help="delete steps of a run by their numbers",
        description="Delete complete steps beneath a root: all that are named, or none. A pinned "
        "step is refused, the newest one without --force, and one that is being saved. One that "
        "is being loaded from a directory stays: then the exit code is 1. Exits with 2 when "
        "nothing is deleted.",
    )
    _add_steps(gone)
    gone.add_argument("--force", action="store_true", help="delete the newest step, too")
    _add_json(gone, "the report")

    for name, pins, what in (
        ("pin", True, "keep steps of a run whatever the rules say"),
        ("unpin", False, "leave steps of a run to the rules again"),
    ):
        description = f"{what.capitalize()}. Exits with 2 when one of them is not there."
        pin = command(name, pin_step, help=what, description=description)
        pin.set_defaults(pins=pins)
        _add_steps(pin)
        _add_json(pin, "the report")
    return parser
