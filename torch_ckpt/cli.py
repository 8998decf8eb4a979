"""The command line: ``torch-ckpt`` and ``python -m torch_ckpt``.

A command is one function that takes the parsed arguments, prints to stdout and returns the exit
code; ``_parser`` names it in a subparser. The work is done by a module for each: ``listing``,
``verifying``, ``comparing``. A command raises CheckpointError or OSError for what it cannot read:
``main`` makes of it one sentence on stderr and exit code 2.

Exit codes: 0 all is well, 1 the command ran and found something wrong with the checkpoint, or a
difference, 2 there is no checkpoint to look at (or the command line is wrong).
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch_ckpt.comparing import diff
from torch_ckpt.errors import CheckpointError
from torch_ckpt.listing import document, examine, file_lines, item_lines, total_line
from torch_ckpt.text import printable
from torch_ckpt.verifying import verify


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _ls(arguments: argparse.Namespace) -> int:
    """Lists one checkpoint; returns 1 when files or shards of it are missing or files too short."""
    directory: Path = arguments.directory
    listing = examine(directory)
    if arguments.json:
        print(json.dumps(document(listing, directory), indent=2))
    else:
        _print((file_lines if arguments.files else item_lines)(listing))
        print()
        print(total_line(listing))
    if listing.faults:
        faults = printable(", ".join(listing.faults))
        print(f"torch-ckpt: {directory} cannot be loaded whole: {faults}", file=sys.stderr)
        return 1
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    """Verifies one checkpoint; returns 1 when something of it is damaged or missing."""
    report = verify(
        arguments.directory,
        thread_count=arguments.threads,
        progress=_wants_bar(arguments),
    )
    if arguments.json:
        print(json.dumps(report.document(), indent=2))
    elif not arguments.quiet:
        _print(report.lines())
    elif not report.ok:
        _print(report.faults())
    return 0 if report.ok else 1


def _diff(arguments: argparse.Namespace) -> int:
    """Compares two checkpoints; returns 1 when they differ."""
    report = diff(
        arguments.a,
        arguments.b,
        atol=arguments.atol,
        rtol=arguments.rtol,
        progress=_wants_bar(arguments),
    )
    if arguments.json:
        print(json.dumps(report.document(), indent=2))
    else:
        _print(report.lines())
    return 0 if report.equal else 1


def _wants_bar(arguments: argparse.Namespace) -> bool:
    quiet = arguments.json or getattr(arguments, "quiet", False)
    if quiet or not sys.stderr.isatty():
        return False
    return importlib.util.find_spec("tqdm") is not None


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _tolerance(text: str) -> float:
    number = float(text)
    if not number >= 0:
        raise ValueError(text)
    return number


def _parser() -> argparse.ArgumentParser:
    """Builds the command line; a command is a subparser with its function as the default `run`."""
    parser = argparse.ArgumentParser(
        prog="torch-ckpt", description="Look at checkpoints of torch_ckpt and of stock PyTorch."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    ls = commands.add_parser(
        "ls",
        help="list what a checkpoint holds",
        description="List the tensors and objects of a checkpoint directory. Reads its metadata "
        "and the lengths of its files, not the data. Exits with 1 when a data file or a shard is "
        "missing or a file is too short, with 2 when there is no checkpoint that can be read.",
    )
    ls.add_argument("directory", type=Path, metavar="DIR", help="the checkpoint directory")
    form = ls.add_mutually_exclusive_group()
    form.add_argument("--files", action="store_true", help="one line per file instead of per item")
    form.add_argument("--json", action="store_true", help="everything as one JSON document")
    ls.set_defaults(run=_ls)

    check = commands.add_parser(
        "verify",
        help="read all of a checkpoint and compare it with its checksums",
        description="Read every record of a checkpoint directory, compare it with every checksum "
        "that there is, and name all that is damaged or missing. Exits with 0 when all is sound, "
        "with 1 when it is not, with 2 when there is no checkpoint that can be read.",
    )
    check.add_argument("directory", type=Path, metavar="DIR", help="the checkpoint directory")
    check.add_argument(
        "--threads", type=_at_least_one, metavar="N", help="reads under way at once (default: 8)"
    )
    shape = check.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="everything as one JSON document")
    shape.add_argument("--quiet", action="store_true", help="say only what is wrong")
    check.set_defaults(run=_verify)

    compare = commands.add_parser(
        "diff",
        help="compare two checkpoints by name, shape, dtype and value",
        description="Compare two checkpoint directories, however each is sharded. Objects are "
        "compared by their stored bytes and never unpickled. Exits with 0 when they are equal, or "
        "within the tolerances if some are given, with 1 when they differ, with 2 when one cannot "
        "be read.",
    )
    compare.add_argument("a", type=Path, metavar="A", help="a checkpoint directory")
    compare.add_argument("b", type=Path, metavar="B", help="another")
    compare.add_argument(
        "--atol", type=_tolerance, metavar="X", help="allow |a - b| <= X + Y * |b|"
    )
    compare.add_argument("--rtol", type=_tolerance, metavar="Y", help="see --atol")
    compare.add_argument("--json", action="store_true", help="everything as one JSON document")
    compare.set_defaults(run=_diff)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; `argv` is without the program's name.

    Raises SystemExit with code 2 for a wrong command line (and 0 for ``--help``), as argparse does.
    """
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has seen enough. What is still buffered goes nowhere, or
        # Python complains about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # Without Python's "[Errno 2]" and quotes, which say nothing more to people.
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"torch-ckpt: {printable(text)}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"torch-ckpt: {printable(str(error))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
