"""The exports of a checkpoint manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsIndex

from torch_ckpt._base.checks import require_at_least
from torch_ckpt.huggingface.model_target import Safetensors, StrPath
from torch_ckpt.options import DEFAULT_OPTIONS, WriteOptions
from torch_ckpt.publication.publish import DEFAULT_FORMAT, refuse_options, version_options
from torch_ckpt.publication.version_target import VersionTarget
from torch_ckpt.steps.retention import Retention

if TYPE_CHECKING:
    from typing_extensions import Never  # in typing since Python 3.11


class Export:
    """Publishes the model of a :class:`torch_ckpt.CheckpointManager` while training continues.

    The version has the number of the step. If training was rewound to an earlier step, the next
    export deletes the stale versions, those of later steps, and logs a warning. It never deletes a
    pinned version. A version that is not stale is never replaced.

    Args:
        root: the directory of the versions; see :func:`torch_ckpt.publish`.
        every: export at every step that is a multiple of this number. If a save is running or
            starts at that step, the export starts after the save, but no later than with the next
            save. None exports only in :meth:`CheckpointManager.export`.
        entry: the key in the state of the value to export: a module, or a dict of tensors.
        base, delta, keep: see :func:`torch_ckpt.publish`.
        format: the options of the files, such as ``dtype`` and ``config``.
        options: the options of the save.
        removed: no keyword; the error for a former one names what replaces it.

    Raises:
        ValueError, TypeError: an option is out of range or unknown.

    Example::

        format = torch_ckpt.Safetensors(dtype="bf16", config="llama/")
        export = torch_ckpt.Export("exports", every=1000, format=format, keep=3)
        with torch_ckpt.CheckpointManager("checkpoints", interval=100, export=export) as manager:
            ...
    """

    def __init__(
        self,
        root: StrPath,
        *,
        every: int | None = None,
        entry: str = "model",
        base: SupportsIndex | str | None = None,
        delta: bool = False,
        keep: SupportsIndex | Retention | None = None,
        format: Safetensors = DEFAULT_FORMAT,
        options: WriteOptions = DEFAULT_OPTIONS,
        **removed: Never,
    ) -> None:
        if removed:
            refuse_options(Export, removed)
        if every is not None:
            require_at_least("every", every, 1)
        self.root = root
        self.every = every
        self.entry = entry
        self._format = format
        self._options = options
        self._version_options = version_options(None, base, delta, keep)
        # Detect invalid options now, not in the first export.
        self.target(0, None)

    def target(self, version: int, newest_valid: int | None) -> VersionTarget:
        """Returns the target of one export.

        Args:
            version: number of the version.
            newest_valid: see :class:`VersionTarget`.
        """
        chosen = self._version_options | {"version": version}
        return VersionTarget(
            self.root, self._format, self._options, **chosen, newest_valid=newest_valid
        )
