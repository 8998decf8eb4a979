"""What the failures of ranks say: in words, and of which step's files."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.errors import Corrupt


def causes(error: BaseException) -> str:
    """What went wrong, and on which ranks."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    return "; ".join(
        f"rank {rank}: {type(cause).__name__}: {cause}"
        for rank, (cause, _frames) in sorted(error.failures.items())
    )


def is_damage(error: CheckpointException) -> bool:
    """Whether the step's files are at fault, and those of another step may be well.

    Other errors of the system, as of a disk or a network that does not answer, are nobody's to pass
    over: an older step would be restored, and the newer one replaced.
    """
    found = [cause for cause, _frames in error.failures.values()]
    return all(isinstance(cause, Corrupt | EOFError | FileNotFoundError) for cause in found)


def is_elsewhere(error: CheckpointException) -> bool:
    """Whether only other ranks than rank 0, which has listed it, do not find the step."""
    found = [cause for cause, _frames in error.failures.values()]
    return 0 not in error.failures and all(isinstance(c, FileNotFoundError) for c in found)
