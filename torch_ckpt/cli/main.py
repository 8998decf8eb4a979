"""The command line: ``torch-ckpt`` and ``python -m torch_ckpt``.

A command is one function that takes the parsed arguments, prints to stdout and returns the exit
code; ``_parser`` names it in a subparser. The work is done by a module for each: ``listing``,
``showing``, ``verifying``, ``comparing``, ``converting``, ``doctor``, ``collecting``. A command
raises CheckpointError or OSError for what it cannot do: ``main`` makes of it one sentence on stderr
and exit code 2. docs/cli.md has the exit codes.
"""

import os
import sys
from collections.abc import Sequence

from torch_ckpt._base.formatting import sentence
from torch_ckpt.cli.arguments import Run, parser_of_all
from torch_ckpt.cli.commands import complain
from torch_ckpt.errors import CheckpointError

# Where the end of the output, and with it the outcome, is not known: as of a process that SIGPIPE
# has ended.
_CLOSED_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; `argv` is without the program's name.

    Raises SystemExit with code 2 for a wrong command line (and 0 for ``--help``), as argparse does.
    """
    arguments = parser_of_all().parse_args(argv)
    run: Run = arguments.run
    code = _CLOSED_PIPE
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has seen enough. What is still buffered goes nowhere, or
        # Python complains about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except (OSError, CheckpointError) as error:
        complain(sentence(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
