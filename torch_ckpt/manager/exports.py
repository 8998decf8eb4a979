"""Decides at which steps a checkpoint manager exports its model.

1. An export is due at every step that is a multiple of :attr:`Export.every`.
2. If no save starts at that step, the export starts at the first step at which rank 0 runs no
   save, so that training does not wait for a save. Rank 0 decides for all ranks
   (ranks/step_agreement.py).
3. If a save starts at that step, the export waits for a later step. At the next step at which a
   save starts, the export starts first, and the save waits for it.
4. Versions of later steps than the restored one are stale. The next export replaces them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, SupportsIndex

from torch_ckpt._base.checks import require_at_least
from torch_ckpt._base.system import absolute, local_path
from torch_ckpt.huggingface.model_target import Safetensors, StrPath
from torch_ckpt.options import DEFAULT_OPTIONS, WriteOptions
from torch_ckpt.publication.publish import DEFAULT_FORMAT, refuse_options, version_options
from torch_ckpt.publication.version_target import NewVersion, version_target
from torch_ckpt.saving.target import Target
from torch_ckpt.steps.retention import Retention


class Exports:
    """The exports of a manager. All ranks come to the same decisions.

    Args:
        export: the model to export; None disables exports.

    Attributes:
        due_step: the step of a due export that has not started; None if there is none.
        newest_valid: versions of later steps are stale; None if training was not rewound.
        last_step: the step of the last export that succeeded.
    """

    def __init__(self, export: Export | None) -> None:
        self.export = export
        self.due_step: int | None = None
        self.newest_valid: int | None = None
        self.last_step: int | None = None

    def rewound(self, step: int) -> None:
        """Records that training continues from a step."""
        self.newest_valid, self.due_step, self.last_step = step, None, None

    def succeeded(self, step: int) -> None:
        """Records that the model of a step was exported: its version is not stale."""
        self.last_step = step
        if self.newest_valid is not None:
            self.newest_valid = max(self.newest_valid, step)

    def is_due(self, step: int) -> bool:
        """True if an export is due at this step or was due before. All ranks must call this method
        once per step."""
        every = None if self.export is None else self.export.every
        if every is not None and self.due_step is None and step % every == 0:
            self.due_step = step
        return self.due_step is not None

    def starts(self, step: int, starts_save: bool, is_idle: bool) -> bool:
        """True if the export that is due starts at this step.

        Args:
            starts_save: a save starts at this step.
            is_idle: rank 0 runs no save.
        """
        assert self.due_step is not None
        starts = self.due_step < step if starts_save else is_idle
        if starts:
            self.due_step = None
        return starts


def _refuses_former_options(cls: type[Export]) -> type[Export]:
    """Makes the constructor of a dataclass name the object that has the option of a former
    keyword."""
    construct: Callable[..., None] = cls.__init__

    @functools.wraps(construct)
    def __init__(self: Export, *args: Any, **options: object) -> None:
        unknown = {name: options[name] for name in options if name not in cls.__annotations__}
        if unknown:
            refuse_options(cls, unknown)
        construct(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@_refuses_former_options
@dataclass(frozen=True)
class Export:
    """Publishes the model of a :class:`torch_ckpt.CheckpointManager` while training continues.

    The version has the number of the step. If training was rewound to an earlier step, the next
    export deletes the stale versions, those of later steps, and logs a warning. It never deletes a
    pinned version. A version that is not stale is never replaced.

    Attributes:
        root: the directory or URL of the versions; see :func:`torch_ckpt.publish`.
        every: export at every step that is a multiple of this number. If a save is running or
            starts at that step, the export starts after the save, but no later than with the next
            save. None exports only in :meth:`CheckpointManager.export`.
        entry: the key in the state of the value to export: a module, or a dict of tensors.
        base, delta, keep: see :func:`torch_ckpt.publish`.
        format: the options of the files, such as ``dtype`` and ``config``.
        options: the options of the save.

    Raises:
        ValueError, TypeError: an option has an invalid value or is unknown.

    Example::

        format = torch_ckpt.Safetensors(dtype="bf16", config="llama/")
        export = torch_ckpt.Export("exports", every=1000, format=format, keep=3)
        with torch_ckpt.CheckpointManager("checkpoints", interval=100, export=export) as manager:
            ...
    """

    root: StrPath
    _: KW_ONLY
    every: int | None = None
    entry: str = "model"
    base: SupportsIndex | str | None = None
    delta: bool = False
    keep: SupportsIndex | Retention | None = None
    format: Safetensors = DEFAULT_FORMAT
    options: WriteOptions = DEFAULT_OPTIONS

    def __post_init__(self) -> None:
        if self.every is not None:
            require_at_least("every", self.every, 1)
        root = local_path(self.root)
        if root is not None:
            # The program may change its working directory.
            object.__setattr__(self, "root", os.fspath(absolute(root)))
        # Detect invalid options now, not in the first export.
        self.target(0, None)

    def target(self, version: int, newest_valid: int | None) -> Target:
        """Returns the target of one export.

        Args:
            version: number of the version.
            newest_valid: see :class:`NewVersion`.
        """
        chosen = version_options(version, self.base, self.delta, self.keep)
        new = NewVersion(**chosen, newest_valid=newest_valid)
        return version_target(self.root, self.format, self.options, new)
