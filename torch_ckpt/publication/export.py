"""The exports of a checkpoint manager."""

from __future__ import annotations

from typing import Any, SupportsIndex

from torch_ckpt._base.options import require_at_least
from torch_ckpt.huggingface.safetensors_writer import StrPath
from torch_ckpt.publication.publish import check_options
from torch_ckpt.publication.version_writer import VersionWriter
from torch_ckpt.retention import Retention


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
        options: the options of :class:`SafetensorsWriter`, such as ``dtype`` and ``config``.

    Raises:
        ValueError, TypeError: an option is out of range or unknown.

    Example::

        export = torch_ckpt.Export("exports", every=1000, dtype="bf16", config="llama/", keep=3)
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
        **options: Any,
    ) -> None:
        if every is not None:
            require_at_least("every", every, 1)
        self.root = root
        self.every = every
        self.entry = entry
        self.options = check_options(Export, frozenset(), None, base, delta, keep, options)
        # Detect invalid options now, not in the first export.
        VersionWriter(root, **self.options)
        del self.options["version"]
