"""The writer of directories in Hugging Face's layout.

1. The coordinator lays out the files from the plan of all ranks. Names, dtypes and sizes determine
   every offset (csrc/planning/safetensors_layout.h).
2. Each rank receives the places of its tensors, and writes its parts there. No rank holds more than
   its own shards, and nothing is consolidated afterwards.
3. The coordinator completes and publishes the directory. csrc/directory/model_save.h has the
   protocol.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _C, _core
from torch_ckpt._base.cuda_events import refuse_capture
from torch_ckpt._base.options import require_at_least, reusable
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.lazy_metadata import LazyContents, LazyMetadata
from torch_ckpt.conversion.selection import parse_dtype
from torch_ckpt.conversion.transformers_config import CONFIG_NAME, Config
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.reader import FileSystemReader
from torch_ckpt.loading.renaming import Rename, new_names
from torch_ckpt.saving.global_plan import Assignment, GlobalPlan
from torch_ckpt.saving.items import Written
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.saving.writer import FileSystemWriter

#: Default for max_shard_size, as in transformers.
SHARD_BYTES = 5 * 10**9

StrPath = str | os.PathLike[str]


class SavedModel(NamedTuple):
    """A directory that a save has published.

    Attributes:
        path: its path.
    """

    path: str

    def metadata(self) -> Metadata:
        """Returns lazy metadata, which is read from the directory on first access."""
        return LazyMetadata(LazyContents(partial(_read, self.path)))


def _read(path: str) -> Metadata:
    return FileSystemReader(path).read_metadata()


class SafetensorsWriter(FileSystemWriter):
    """Writes the tensors of a state dict to a directory of safetensors files in Hugging Face's
    layout, by all ranks at once.

    The directory appears under its name once it is complete and durable. A directory that it
    replaces is kept until then, and must contain only files that such a save writes.

    Args:
        path: the directory.
        max_shard_size: maximum number of bytes of tensors per file. A larger tensor gets a file of
            its own.
        dtype: dtype in which floating-point tensors are stored: a torch dtype, its name, "bf16",
            "fp16" or "fp32". None keeps each tensor's dtype.
        rename: maps the names in the state dict to names in the files; see
            :func:`torch_ckpt.load`. The names must stay different.
        config: the model's ``config.json``, or a directory that contains one, to copy to ``path``.
            If ``dtype`` is given, the copied file states that dtype.
        copied: more files to copy to ``path``, such as the tokenizer's.
        metadata: texts to store in the header of each file.
        writer_options: ``thread_count``, ``max_host_bytes``, ``direct_io``, ``sync_files``,
            ``overwrite``, ``progress`` and ``background``; see :class:`FileSystemWriter`.

    Raises:
        ValueError: an option is out of range or contradicts another one, or ``path`` is a URL.
        CheckpointError: ``config`` is not a JSON object, or two files to copy have the same name.
        OSError: a file to copy cannot be read.

    Raises (from a save, on every rank, inside a ``CheckpointException``):
        CheckpointError: the files cannot hold a value; the message names the value.
        FileExistsError: ``path`` exists and must not be replaced.
        OSError, DurabilityUncertain: a system call failed, or the last fsync did.

    Examples:
        ```python
        writer = torch_ckpt.SafetensorsWriter("exports/final", dtype="bf16", config="llama/")
        torch_ckpt.save(get_model_state_dict(model), storage_writer=writer)
        ```
    """

    def __init__(
        self,
        path: StrPath,
        *,
        max_shard_size: int = SHARD_BYTES,
        dtype: torch.dtype | str | None = None,
        rename: Rename = None,
        config: StrPath | None = None,
        copied: Iterable[StrPath] = (),
        metadata: Mapping[str, str] | None = None,
        **writer_options: Any,
    ) -> None:
        super().__init__(path, **writer_options)
        require_at_least("max_shard_size", max_shard_size, 1)
        self._max_shard_size = max_shard_size
        self._dtype = None if dtype is None else parse_dtype(dtype)
        self._rename = reusable(rename)
        self._metadata = {"format": "pt"} if metadata is None else dict(metadata)
        self._copied = {Path(file).name: Path(file).read_bytes() for file in copied}
        if config is not None:
            self._copied[CONFIG_NAME] = Config(os.fspath(config)).text(self._dtype)
        self._save: _core.ModelSave | None = None
        self._layout: _core.SafetensorsLayout | None = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_save": None, "_layout": None}

    # --- in the order of a save ------------------------------------------------------------------

    def set_up_for_save(self, rank: int) -> None:
        self.abandon()
        refuse_capture()
        self._refuse_url()
        self.rank = rank
        self.use_collectives = True
        self._is_coordinator = rank == 0
        _core.make_directories(os.fspath(self._parent))

    @property
    def identity(self) -> str | None:
        options = (self._max_shard_size, self._dtype, sorted(self._metadata.items()))
        return f"safetensors {self.path} {options}"

    @property
    def _parent(self) -> Path:
        return Path(self.path).parent

    @property
    def directory(self) -> OpenDirectory:
        """The directory in which files are written; before the plan is known, its parent."""
        if self._directory is None:
            self._directory = OpenDirectory(self._parent)
        return self._directory

    @directory.setter
    def directory(self, opened: OpenDirectory) -> None:
        self._directory = opened

    @property
    def tag(self) -> str:
        """The temporary name of the directory."""
        return "" if self._save is None else self._save.temporary

    def places(self, plan: GlobalPlan) -> Sequence[bytes]:
        """Lays out the files on the coordinator, and returns the places of each rank's tensors.

        Raises:
            CheckpointError: the files cannot hold a value.
            FileExistsError: the directory exists and must not be replaced.
        """
        if plan.torch_metadata:
            name = next(iter(plan.torch_metadata))
            raise CheckpointError(
                f"{name}: safetensors files hold only plain tensors and DTensors; convert the "
                "value first, or leave it out"
            )
        names = plan.engine.names()
        renamed = None if self._rename is None else [*new_names(names, self._rename).values()]
        dtype = None if self._dtype is None else str(self._dtype).removeprefix("torch.")
        try:
            self._layout = _core.SafetensorsLayout(
                plan.engine, renamed, dtype, self._max_shard_size, [*self._metadata.items()]
            )
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        self._save = _core.ModelSave(self.directory, Path(self.path).name, self.overwrite)
        return [self._layout.places(plan.engine, rank) for rank in range(len(plan.assignments))]

    def sources(self, state: SaveState, assignment: Assignment, places: bytes) -> _C.SaveSources:
        return state.parts(assignment, places, self._dtype)

    def prefix(self, tag: str) -> str:
        self._directory = self.directory.open_directory(tag)
        return ""

    def commit_plan(self, plan: GlobalPlan, written: list[Written], ranks: int) -> SavedModel:
        save, layout = self._save, self._layout
        assert save is not None and layout is not None
        try:
            files = [of_rank.files for of_rank in written]
            save.complete(layout, [*self._copied.items()], files, self.sync_files)
        except BaseException:
            self.abandon()
            raise
        self._save = self._layout = self._directory = None
        save.publish(self.sync_files)
        return SavedModel(os.fspath(self.path))

    def undo(self, written: Written) -> None:
        """Does nothing: the coordinator removes the directory."""

    def abandon(self) -> None:
        save, self._save, self._layout = self._save, None, None
        self._directory = None
        if save is not None:
            save.discard()
