"""The entry point of ``torch-ckpt`` and ``python -m torch_ckpt``.

``arguments`` builds the parser. Each subparser names a function of ``commands``, which accepts the
parsed arguments, prints to stdout and returns the exit code. A command that
fails raises CheckpointError or OSError; ``main`` prints the error as one sentence on stderr and
returns exit code 2.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from torch_ckpt._base.formatting import sentence
from torch_ckpt.cli.arguments import (
    Command,
    build_parser,
    overview,
    suggest_command,
    suggest_option,
)
from torch_ckpt.cli.output import ExitCode, print_error
from torch_ckpt.errors import CheckpointError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        argv: the arguments without the program name; None uses ``sys.argv``.

    Raises:
        SystemExit: raised by argparse, with code 2 if the command line is invalid, and with code 0
            after ``--help`` and ``--version``.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # set by the shell, for tab completion
        with suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(parser)
    if not argv:
        print(overview(), end="", file=sys.stderr)
        return ExitCode.ERROR
    if problem := suggest_command(parser, argv[0]):
        parser.error(problem)
    arguments = _parse(parser, argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names may contain characters that the terminal's encoding cannot represent.
        sys.stdout.reconfigure(errors="backslashreplace")
    run: Command = arguments.run
    code = ExitCode.CLOSED_PIPE
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of a pipe (`| head`) closed it. Discard the buffered output; otherwise Python
        # reports the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except KeyboardInterrupt:
        print_error("interrupted")
        return ExitCode.INTERRUPTED
    except (OSError, CheckpointError) as error:
        print_error(sentence(error))
        return ExitCode.ERROR


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    arguments, rest = parser.parse_known_args(argv)
    if rest and getattr(arguments, "names", None) == []:
        # argparse assigns names only if they directly follow the directory, not after an option.
        arguments.names = [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    if rest:
        command: argparse.ArgumentParser = arguments.command
        command.error(f"unrecognized arguments: {' '.join(rest)}{suggest_option(command, rest[0])}")
    return arguments
