"""What becomes of a write task that is staged, whoever writes it."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from contextvars import ContextVar

from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt.saving.background import Background

#: By file: its number, and what was written to it.
Results = dict[int, list[WriteResult]]


@dataclasses.dataclass
class Stage:
    """What is staged in a ``with`` block of it.

    Attributes:
        background: how the engine's threads behave; None: as the writer says.
        writes: that have been begun, the last one perhaps not staged yet.
    """

    background: Background | None = None
    writes: list[Staged] = dataclasses.field(default_factory=list)

    def __enter__(self) -> Stage:
        self._token = _stage.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stage.reset(self._token)


_stage: ContextVar[Stage] = ContextVar("torch_ckpt_stage")


def current_stage() -> Stage:
    """That of the ``with`` block, or one that nobody looks at."""
    return _stage.get(Stage())


class Staged:
    """A write whose sources are not needed any more; as theirs, a sequence of what is staged."""

    def __iter__(self) -> Iterator[Staged]:
        yield self

    def __len__(self) -> int:
        return 1

    def outcome(self, transforms: _StorageWriterTransforms | None) -> Results | Exception:
        """Waits for the end; the results by file number, or why there are none. Never raises."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Makes it leave no file, and its writer fail, unless that one has the results."""

    def moved(self) -> int:
        """Grows for as long as anything moves."""
        return 0

    def state(self) -> str:
        """What it is doing, for a message: files, phase, bytes."""
        return "writing"


class Nothing(Staged):
    """What is staged where there is nothing to write."""

    def outcome(self, transforms: _StorageWriterTransforms | None) -> Results | Exception:
        return {}


class NotBegun(Staged):
    """A write that has failed before its first byte."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def outcome(self, transforms: _StorageWriterTransforms | None) -> Results | Exception:
        return self._error


def files_of(outcome: Results | Exception | None) -> set[str]:
    """The names of the files that a write has left."""
    if not isinstance(outcome, dict):
        return set()
    return {result.storage_data.relative_path for of in outcome.values() for result in of}


def portable(error: BaseException) -> Exception:
    """The same error without frames, or its text where it is none that can be sent."""
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = None
    if isinstance(copied, Exception):
        return copied
    return RuntimeError(f"{type(error).__name__}: {error}")
