"""The exit codes of torch-ckpt."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """An exit code; ``meaning`` is its description in ``--help`` and docs/cli.md."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    SUCCESS = 0, "the command succeeded and found nothing wrong"
    FINDING = (
        1,
        "ls, show, verify: something is damaged or missing; diff: the checkpoints differ; "
        "gc, delete: a step to be deleted is in use; doctor: an assumption does not hold",
    )
    ERROR = (
        2,
        "the command line is invalid, or the command failed (for example, no checkpoint, no "
        "permission or no space); verify: no damage was found, but part of the checkpoint could "
        "not be read",
    )
    INTERRUPTED = 130, "Ctrl-C stopped the command"
    CLOSED_PIPE = 141, "the output pipe was closed before the result was known"
