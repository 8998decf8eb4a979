"""The writer of directories in Hugging Face's layout.

1. The coordinator lays out the files from the plan of all ranks. Names, dtypes and sizes determine
   every offset (csrc/planning/safetensors_layout.h).
2. Each rank receives the places of its tensors, and writes its parts there. No rank holds more than
   its own shards, and nothing is consolidated afterwards. Ranges of which several ranks of a
   machine write short runs are collected in shared memory (csrc/engine/collective_buffer.h).
3. The coordinator completes and publishes the directory. csrc/directory/model_save.h has the
   protocol.
"""

from __future__ import annotations

import dataclasses
import os
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.planner import SavePlanner as TorchsSavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_ckpt import _C, _core
from torch_ckpt._base.cuda_events import refuse_capture
from torch_ckpt._base.options import require_at_least, reusable
from torch_ckpt._base.progress import ProgressOption
from torch_ckpt.checkpoint.directory import OpenDirectory, require_one_directory
from torch_ckpt.checkpoint.lazy_metadata import LazyContents, LazyMetadata, make_lazy
from torch_ckpt.errors import CheckpointError
from torch_ckpt.huggingface.transformers_config import CONFIG_NAME, Config
from torch_ckpt.loading.dtypes import parse_dtype
from torch_ckpt.loading.reader import FileSystemReader
from torch_ckpt.loading.renaming import Rename, new_names
from torch_ckpt.saving.background import Background
from torch_ckpt.saving.global_plan import Assignment, GlobalPlan
from torch_ckpt.saving.items import Written, brought_with, resolve, results_of
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.saving.writer import FileSystemWriter, completed

#: Default for max_shard_size, as in transformers.
SHARD_BYTES = 5 * 10**9

#: Names of the files that every save writes itself.
_WRITTEN = re.compile(
    r"(model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json"
    r"|torch_ckpt\.checksums|torch_ckpt\.delta|write_completed)$"
)

StrPath = str | os.PathLike[str]


class SavedModel(NamedTuple):
    """A directory that a save has published.

    Attributes:
        path: its path.
    """

    path: str

    @property
    def contents(self) -> LazyContents:
        """The contents of the metadata, which are read from the directory on first access."""
        return LazyContents(partial(_read, self.path))

    def metadata(self) -> Metadata:
        """Returns lazy metadata."""
        return LazyMetadata(self.contents)


def _read(path: str) -> Metadata:
    return FileSystemReader(path).read_metadata()


class NewDirectory:
    """A directory that the coordinator has created under a temporary name.

    If it is dropped before publish(), as DCP does after a failure, the directory is removed.
    """

    def __init__(
        self, parent: OpenDirectory, name: str, replace: bool, copied: Collection[str]
    ) -> None:
        self._save = _core.ModelSave(parent, name, replace, list(copied))
        self._discard = weakref.finalize(self, _discard, self._save, os.getpid())

    @property
    def temporary(self) -> str:
        return self._save.temporary

    def complete(
        self,
        layout: _core.SafetensorsLayout,
        copied: Mapping[str, bytes],
        tables: list[dict[str, bytes]],
        sync: bool,
    ) -> None:
        self._save.complete(layout, [*copied.items()], tables, sync)

    def link_unchanged(self, base: OpenDirectory, sync: bool) -> None:
        self._save.link_unchanged(base, sync)

    def write_delta(self, base: OpenDirectory, name: str, sync: bool) -> None:
        self._save.write_delta(base, name, sync)

    def publish(self, sync: bool) -> None:
        self._discard.detach()
        self._save.publish(sync)

    def discard(self) -> None:
        self._discard()


def _discard(save: _core.ModelSave, pid: int) -> None:
    # The parent of a forked child may continue the save.
    if os.getpid() == pid:
        save.discard()


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
            If ``dtype`` is given, the copied file states that dtype. If ``transformers`` is
            installed, a weight that the model ties to another weight is left out if both have the
            same memory; ``from_pretrained`` ties them again.
        copied: more files to copy to ``path``, such as the tokenizer's.
        metadata: texts to store in the header of each file.
        thread_count: number of files that this rank writes concurrently.
        sync_files, overwrite, max_host_bytes, direct_io, progress, background: see
            :class:`FileSystemWriter`.

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

    #: Checksums of parts and checksums of checkpoints cannot be compared.
    finds_unchanged = False

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
        thread_count: int | None = None,
        sync_files: bool = True,
        overwrite: bool = True,
        max_host_bytes: int | None = None,
        direct_io: bool | str = "auto",
        progress: ProgressOption = None,
        background: Background = Background(),  # noqa: B008  immutable
    ) -> None:
        super().__init__(
            path,
            thread_count=thread_count,
            sync_files=sync_files,
            overwrite=overwrite,
            max_host_bytes=max_host_bytes,
            direct_io=direct_io,
            progress=progress,
            background=background,
        )
        if not isinstance(max_shard_size, int):
            raise ValueError(f"max_shard_size must be a number of bytes, got {max_shard_size!r}")
        require_at_least("max_shard_size", max_shard_size, 1)
        self._max_shard_size = max_shard_size
        self._dtype = None if dtype is None else parse_dtype(dtype)
        self._rename = reusable(rename)
        self._metadata = {"format": "pt"} if metadata is None else dict(metadata)
        if not all(map(_is_unicode, (*self._metadata, *self._metadata.values()))):
            raise ValueError(f"metadata must map Unicode strings to such strings, got {metadata!r}")
        self._config = None if config is None else Config(os.fspath(config))
        self._copied: dict[str, bytes] = {}
        if self._config is not None:
            self._copied[CONFIG_NAME] = self._config.text(self._dtype)
        for file in map(Path, copied):
            if file.name in self._copied:
                raise CheckpointError(f"{file}: two files to copy are named {file.name}")
            if _WRITTEN.match(file.name):
                raise CheckpointError(f"{file}: the save writes a file named {file.name} itself")
            self._copied[file.name] = file.read_bytes()
        self._save: NewDirectory | None = None
        self._layout: _core.SafetensorsLayout | None = None
        self._memory: _core.MemoryFile | None = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_save": None, "_layout": None, "_memory": None}

    # --- for torch_ckpt.save, in the order of a save ---------------------------------------------

    def set_up_for_save(self, rank: int) -> None:
        self.abandon()
        refuse_capture()
        self._refuse_url()
        path = os.fspath(self.path)
        if Path(path).name in ("", "..") or (os.path.exists(path) and os.path.samefile(path, ".")):
            raise CheckpointError(
                f"{path}: a save would replace this directory, in which the program runs or which "
                "has no name; save to a directory inside it"
            )
        self.rank = rank
        self.use_collectives = True
        self._is_coordinator = rank == 0
        _core.make_directories(os.fspath(self._parent))

    def offer_memory(self) -> bytes:
        if self._memory is None:
            self._memory = _core.offer_memory()
        return b"" if self._memory is None else self._memory.address

    @property
    def identity(self) -> str | None:
        # Two functions that rename cannot be compared.
        rename = "a function" if callable(self._rename) else repr(self._rename)
        copied = {name: _core.crc32(contents) for name, contents in self._copied.items()}
        return (
            f"safetensors files in {self.path} with max_shard_size={self._max_shard_size}, "
            f"dtype={self._dtype}, rename={rename}, metadata={self._metadata}, copies={copied}"
        )

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

    def prepare_state(self, state: SaveState) -> None:
        if self._config is None:
            return
        names = new_names(state.names(), self._rename)
        of_model = set(self._config.tied_names([*names.values()]))
        tied = [old for old, new in names.items() if new in of_model]
        if tied:
            state.remove(state.aliases(tied, names.keys() - tied))

    def places(self, plan: GlobalPlan, offers: list[bytes]) -> Sequence[bytes]:
        """Lays out the files on the coordinator, and returns the places of each rank's tensors.

        Raises:
            CheckpointError: the files cannot hold a value.
            FileExistsError: the directory exists and must not be replaced.
        """
        names = plan.engine.names()
        renamed = None if self._rename is None else [*new_names(names, self._rename).values()]
        self._begin(lambda *options: _core.SafetensorsLayout(plan.engine, renamed, *options))
        assert self._layout is not None
        places = self._layout.places_of_plan(plan.engine, offers)
        # Equal replies are one object.
        unique = {of_rank: of_rank for of_rank in places}
        return [unique[of_rank] for of_rank in places]

    def _begin(self, lay_out: Callable[..., _core.SafetensorsLayout]) -> None:
        """Lays out the files, and creates the directory under a temporary name."""
        dtype = None if self._dtype is None else _name_of(self._dtype)
        try:
            self._layout = lay_out(dtype, self._max_shard_size, [*self._metadata.items()])
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        self._save = self.new_directory()

    def new_directory(self) -> NewDirectory:
        """Creates the directory under a temporary name, on the coordinator."""
        return NewDirectory(self.directory, Path(self.path).name, self.overwrite, self._copied)

    def sources(self, state: SaveState, assignment: Assignment, places: bytes) -> _C.SaveSources:
        return state.parts(assignment, places, self._dtype)

    def prefix_of_files(self, tag: str) -> str:
        self._directory = self.directory.open_directory(tag)
        return ""

    def commit_plan(self, plan: GlobalPlan, written: list[Written], ranks: int) -> SavedModel:
        return self._publish([of_rank.files.tables for of_rank in written])

    def _publish(self, tables: list[dict[str, bytes]]) -> SavedModel:
        save, layout = self._save, self._layout
        assert save is not None
        assert layout is not None
        try:
            self.complete(save, layout, tables)
        except BaseException:
            self.abandon()
            raise
        self._forget_save()
        save.publish(self.sync_files)
        return SavedModel(os.fspath(self.path))

    def complete(
        self,
        save: NewDirectory,
        layout: _core.SafetensorsLayout,
        tables: list[dict[str, bytes]],
    ) -> None:
        """Writes the files that the ranks have not written, before the directory gets its name.

        Args:
            tables: the encoded checksums that each rank has sent, by file.
        """
        save.complete(layout, self._copied, tables, self.sync_files)

    def undo(self, written: Written) -> None:
        """Does nothing: the coordinator removes the directory."""

    def abandon(self) -> None:
        save = self._save
        self._forget_save()
        if save is not None:
            save.discard()

    def _forget_save(self) -> None:
        self._save = self._layout = self._directory = self._memory = None

    # --- DCP's contract, in the order of a save --------------------------------------------------

    def storage_meta(self) -> StorageMeta:
        # SavePlanner then plans like torch's planner, whose items the methods below understand.
        return StorageMeta(checkpoint_id=str(self.checkpoint_id), save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self.use_collectives:
            raise CheckpointError(
                "safetensors files are written by all ranks together, so use_collectives=False "
                "does not work with SafetensorsWriter"
            )
        self.set_up_for_save(self.rank or 0)
        return dataclasses.replace(plan, storage_data=self.offer_memory())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        tensors: dict[str, tuple[str, list[int]]] = {}
        for item in (item for plan in plans for item in plan.items):
            data = item.tensor_data
            if data is None:
                raise CheckpointError(
                    f"{item.index.fqn}: safetensors files hold only tensors; save this value "
                    "elsewhere"
                )
            tensors[item.index.fqn] = _name_of(data.properties.dtype), list(data.size)
        names = new_names(tensors, self._rename)
        rows = [(names[name], *tensor) for name, tensor in tensors.items()]
        self._begin(lambda *options: _core.SafetensorsLayout.of_tensors(rows, *options))
        assert self._layout is not None
        numbers = {name: number for number, name in enumerate(tensors)}
        parts = []
        for plan in plans:
            chunks = [(numbers[item.index.fqn], _chunk_of(item)) for item in plan.items]
            parts.append([(number, [*c.offsets], [*c.sizes]) for number, c in chunks])
        self._is_alone = len(plans) == 1
        offers = [b"" if self._is_alone else plan.storage_data for plan in plans]
        encoded = self._layout.places_of_parts(parts, offers)
        return [
            dataclasses.replace(plan, storage_data=_Places(self.tag, of_rank, self._dtype))
            for plan, of_rank in zip(plans, encoded, strict=True)
        ]

    def _write_data_of(
        self, plan: SavePlan, planner: TorchsSavePlanner
    ) -> Future[list[WriteResult]]:
        places: _Places = plan.storage_data
        sources = _C.SaveSources()
        sources.set_places(places.encoded)
        for item in plan.items:
            value = resolve(planner, item)
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{item.index.fqn}: safetensors files cannot hold a tensor of this type"
                )
            assert item.tensor_data is not None
            chunk, size = _chunk_of(item), list(item.tensor_data.size)
            if value.shape != chunk.sizes:
                raise CheckpointError(
                    f"{item.index.fqn}: this rank has a tensor of shape {tuple(value.shape)} for "
                    f"a chunk of shape {tuple(chunk.sizes)}"
                )
            offsets = list(chunk.offsets)
            sources.add_part(item.index.fqn, value, size, offsets, places.dtype)
        written = self.write_values(self.prefix_of_files(places.tag), sources)
        return completed(results_of(plan.items, written))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tables, directories = brought_with(results)
        try:
            require_one_directory(directories)
        except BaseException:
            self.abandon()
            raise
        make_lazy(metadata, self._publish(tables).contents)


@dataclasses.dataclass(frozen=True)
class _Places:
    """The places of a rank's items, sent as part of its plan.

    Attributes:
        tag: temporary name of the directory.
        encoded: the files and the places (csrc/planning/safetensors_layout.h).
        dtype: dtype in which floating-point tensors are stored; None keeps each tensor's.
    """

    tag: str
    encoded: bytes
    dtype: torch.dtype | None


def _chunk_of(item: WriteItem) -> ChunkStorageMetadata:
    """Returns the part of the tensor that the item writes."""
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _is_unicode(text: object) -> bool:
    try:
        return isinstance(text, str) and text.encode() is not None
    except UnicodeEncodeError:
        return False


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
