"""The targets of saves in Hugging Face's layout.

:class:`LocalModelTarget` writes a directory, and object_model.py writes objects beneath a URL. The
steps of a save to a directory:

1. The coordinator lays out the files from the plan of all ranks. Names, dtypes and sizes determine
   every offset (csrc/planning/safetensors_layout.h).
2. Each rank receives the places of its tensors, and writes its parts there. No rank holds more than
   its own shards. Ranges of which several ranks of a machine write short runs are collected in
   shared memory (csrc/engine/collective_buffer.h).
3. If ranks of several hosts would write to one file, one rank assembles each file from what the
   other ranks send it (assembly.py). On file systems that take parallel writes, ranks of several
   hosts write to one file, unless they would write short runs to the same ranges.
4. The coordinator completes and publishes the directory. csrc/directory/model_save.h has the
   protocol.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from torch_ckpt import _C, _core
from torch_ckpt._base.checks import refuse_keyword, require_at_least, require_instance, reusable
from torch_ckpt._base.system import absolute
from torch_ckpt.checkpoint.directory import DirectoryIdentity, OpenDirectory
from torch_ckpt.checkpoint.dtypes import parse_dtype
from torch_ckpt.checkpoint.publishing import write_new_file
from torch_ckpt.checkpoint.shared_directory import Probe, View, wait_for
from torch_ckpt.errors import CheckpointError
from torch_ckpt.huggingface.assembly import Assembly, DirectoryFiles, Files, Share, shares_of
from torch_ckpt.huggingface.transformers_config import CONFIG_NAME, Config
from torch_ckpt.loading.renaming import Rename, new_names
from torch_ckpt.options import WriteOptions
from torch_ckpt.ranks.streams import Listener
from torch_ckpt.saving.agreed_plan import AgreedPlan
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.saving.target import Opened, Target, require_one_target
from torch_ckpt.saving.write import Written
from torch_ckpt.stores.folder import CLEANUP_SECONDS, StreamFolder

#: Default for max_shard_size, as in transformers.
SHARD_BYTES = 5 * 10**9

#: Names of the index, and of the file of checksums.
INDEX_NAME, CHECKSUMS_NAME = "model.safetensors.index.json", "torch_ckpt.checksums"

#: Names of the files that every save writes itself.
_WRITTEN = re.compile(
    r"(model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json"
    r"|torch_ckpt\.checksums|torch_ckpt\.delta|write_completed)$"
)

StrPath = str | os.PathLike[str]

# Size of a part of an upload.
_PART_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Safetensors:
    """The format of a directory of safetensors files in Hugging Face's layout.

    Pass it as ``format`` to :func:`torch_ckpt.save`; ``format="safetensors"`` means the defaults.
    Such a directory can hold only tensors. It appears under its name once it is complete and
    durable. A directory that it replaces is kept until then, and must contain only files that such
    a save writes. docs/huggingface.md describes saves to a URL.

    Attributes:
        max_shard_size: maximum number of bytes of tensors per file. A larger tensor gets a file of
            its own.
        dtype: dtype in which floating-point tensors are stored: a torch dtype, its name, "bf16",
            "fp16" or "fp32". None keeps each tensor's dtype.
        rename: maps the names in the state dict to names in the files; see
            :func:`torch_ckpt.load`. The names must stay different.
        config: the model's ``config.json``, or a directory that contains one, to copy to the
            directory. If ``dtype`` is given, the copied file states that dtype. If ``transformers``
            is installed, a weight that the model ties to another weight is left out if both have
            the same memory; ``from_pretrained`` ties them again.
        copied: more files to copy to the directory, such as the tokenizer's.
        metadata: texts to store in the header of each file.

    Raises:
        ValueError: an option is out of range.

    Example::

        format = torch_ckpt.Safetensors(dtype="bf16", config="llama/")
        torch_ckpt.save(get_model_state_dict(model), "exports/final", format=format)
    """

    max_shard_size: int = SHARD_BYTES
    dtype: torch.dtype | str | None = None
    rename: Rename = None
    config: StrPath | None = None
    copied: Iterable[StrPath] = ()
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})

    def __post_init__(self) -> None:
        if not isinstance(self.max_shard_size, int):
            raise ValueError(
                f"max_shard_size must be a number of bytes, got {self.max_shard_size!r}"
            )
        require_at_least("max_shard_size", self.max_shard_size, 1)
        if not all(map(_is_unicode, (*self.metadata, *self.metadata.values()))):
            raise ValueError(
                f"metadata must map Unicode strings to such strings, got {self.metadata!r}"
            )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        object.__setattr__(self, "rename", reusable(self.rename))
        if isinstance(self.copied, str | os.PathLike):
            raise TypeError(f"copied must be a list of files, got {self.copied!r}")
        object.__setattr__(self, "copied", tuple(self.copied))
        object.__setattr__(self, "metadata", dict(self.metadata))


def refuse_model_options(caller: Callable[..., Any], given: dict[str, Any]) -> NoReturn:
    """Raises TypeError for keywords that belong into an object with options."""
    groups = {
        "format=torch_ckpt.Safetensors(...)": [one.name for one in fields(Safetensors)],
        "options=torch_ckpt.WriteOptions(...)": [one.name for one in fields(WriteOptions)],
    }
    refuse_keyword(caller, given, groups)


class NewDirectory:
    """A directory that the coordinator has created under a temporary name.

    If it is dropped before publish(), the directory is removed.

    Attributes:
        name: the name that the directory gets when it is published.
    """

    def __init__(
        self, parent: OpenDirectory, name: str, replace: bool, copied: Collection[str]
    ) -> None:
        self.name = name
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


class ModelTarget(Target):
    """A directory of safetensors files, or objects beneath a URL.

    Args:
        path: the directory, as an absolute path, or the URL.
        format: the options of the files.
        options: the options of the save.

    Attributes:
        layout: the layout of the files; set on the coordinator by :meth:`lay_out`.

    Raises:
        CheckpointError: the format's ``config`` is not a JSON object, or two files to copy have the
            same name.
        OSError: a file to copy cannot be read.
    """

    #: Checksums of parts and checksums of checkpoints cannot be compared.
    finds_unchanged = False

    #: Also assemble a file of which one rank has all parts.
    _assembles_all = False

    def __init__(self, path: StrPath, format: Safetensors, options: WriteOptions) -> None:
        require_instance("format", format, Safetensors)
        super().__init__(path, options)
        self.layout: _core.SafetensorsLayout | None = None
        self._counting = threading.Lock()
        self._rank = 0
        # At which other ranks connect to this rank, and the files that it assembles.
        self._listener: Listener | None = None
        self._assembly: Assembly | None = None
        self._format = format
        dtype = format.dtype
        assert dtype is None or isinstance(dtype, torch.dtype)
        self._dtype = dtype
        self._config = None if format.config is None else Config(os.fspath(format.config))
        self._copied: dict[str, bytes] = {}
        if self._config is not None:
            self._copied[CONFIG_NAME] = self._config.text(dtype)
        for file in map(Path, format.copied):
            if file.name in self._copied:
                raise CheckpointError(f"{file}: two files to copy are named {file.name}")
            if _WRITTEN.match(file.name):
                raise CheckpointError(f"{file}: the save writes a file named {file.name} itself")
            self._copied[file.name] = file.read_bytes()

    def select(self, state: SaveState) -> None:
        if self._config is None:
            return
        names = new_names(state.names(), self._format.rename)
        of_model = set(self._config.tied_names([*names.values()]))
        tied = [old for old, new in names.items() if new in of_model]
        if tied:
            state.remove(state.aliases(tied, names.keys() - tied))

    def write_file(self, name: str, pieces: Iterator[memoryview], bytes: int) -> None:
        """Writes a file of the layout from its contents, which are not in memory at once. For a
        save by one rank, instead of :meth:`files`.

        Args:
            pieces: the contents.
            bytes: size of the contents.

        Raises:
            OSError: the file cannot be written.
        """
        raise NotImplementedError

    def file_names(self) -> list[str]:
        """Returns the names of all files, on the coordinator, once they are laid out."""
        assert self.layout is not None
        index = [INDEX_NAME] if self.layout.index else []
        names = [name for name, _ in self.layout.files()]
        return sorted([*names, *index, *self._copied, CHECKSUMS_NAME])

    def _describe(self) -> str:
        """Returns a description of the save that must be equal on all ranks."""
        form = self._format
        # Two functions that rename cannot be compared.
        rename = "a function" if callable(form.rename) else repr(form.rename)
        copied = {name: _core.crc32(contents) for name, contents in self._copied.items()}
        return (
            f"safetensors files in {self.path} with max_shard_size={form.max_shard_size}, "
            f"dtype={form.dtype}, rename={rename}, metadata={form.metadata}, copies={copied}"
        )

    def count(self, bytes: int) -> None:
        """Counts bytes that the target has moved. Called by several threads."""
        with self._counting:
            self.bytes_moved += bytes

    def tables(self, written: list[Written]) -> list[dict[str, bytes]]:
        """Returns the encoded checksums that each rank has sent, by file of the layout."""
        return [of_rank.files.tables for of_rank in written]

    def written(self) -> None:
        if self._assembly is not None:
            self._assembly.wait()

    def stop(self) -> None:
        assembly, self._assembly = self._assembly, None
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        if assembly is not None:
            assembly.stop(CLEANUP_SECONDS)

    def discard(self) -> None:
        self.stop()
        self.layout = None

    def _listen(self) -> bytes:
        """Opens a port for the parts of files that this rank assembles. Returns the address."""
        self._listener = Listener()
        return self._listener.address

    def _shares(
        self, layout: _core.SafetensorsLayout, plan: AgreedPlan, opened: Sequence[Opened]
    ) -> tuple[list[bytes], list[Share]]:
        """Distributes the files over the ranks, on the coordinator; see :func:`shares_of`."""
        addresses = [one.address for one in opened]
        return shares_of(layout, plan.coordinator, addresses, self._assembles_all)

    def _begin_assembly(self, share: Share, files: Files) -> Assembly:
        """Begins to assemble the files of this rank."""
        self._listener = self._listener or Listener()
        most = self.options.max_host_bytes
        of_windows = None
        if most is not None:
            of_windows = most // 2
            # The engine uses the rest, and needs memory for one part. A save to a URL refuses a
            # smaller limit.
            least = _PART_BYTES if self._assembles_all else min(most, _PART_BYTES)
            of_engine = max(most - of_windows, least)
            self.engine_options = replace(self.options, max_host_bytes=of_engine)
        self._assembly = Assembly(
            share, self._rank, self._listener, self.timeout, files, of_windows, self.count
        )
        return self._assembly

    def _layout_of(self, plan: AgreedPlan, tag: str = "") -> _core.SafetensorsLayout:
        """Lays out the files, on the coordinator.

        Args:
            tag: part of the names of the files.

        Raises:
            CheckpointError: the files cannot hold a value.
        """
        form, coordinator = self._format, plan.coordinator
        renamed = None
        if form.rename is not None:
            renamed = [*new_names(coordinator.names(), form.rename).values()]
        dtype = None if self._dtype is None else str(self._dtype).removeprefix("torch.")
        return _core.SafetensorsLayout(
            coordinator, renamed, dtype, form.max_shard_size, [*form.metadata.items()], tag
        )


class LocalModelTarget(ModelTarget):
    """A directory of safetensors files.

    Args:
        path, format, options: see :class:`ModelTarget`.
    """

    # So the engine only has streams to write.
    _assembles_all = True

    def __init__(self, path: StrPath, format: Safetensors, options: WriteOptions) -> None:
        super().__init__(absolute(path), format, options)
        self._given_path = os.fspath(path)
        self._parent = Path(self.path).parent
        self._directory: OpenDirectory | None = None
        self._save: NewDirectory | None = None
        self._memory: _core.MemoryFile | None = None
        self._new: DirectoryFiles | None = None

    def open(self, rank: int, ranks: int) -> Opened:
        self.discard()
        self._rank = rank
        path = self._given_path
        if Path(path).name in ("", "..") or (os.path.exists(path) and os.path.samefile(path, ".")):
            raise CheckpointError(
                f"{path}: a save would replace this directory, in which the program runs or which "
                "has no name; save to a directory inside it"
            )
        _core.make_directories(os.fspath(self._parent))
        self._directory = OpenDirectory(self._parent)
        if ranks > 1:
            self._memory = _core.offer_memory()
        memory = b"" if self._memory is None else self._memory.address
        address = self._listen() if ranks > 1 and not self._directory.is_local else b""
        return Opened(DirectoryIdentity.of(self._directory), self._describe(), memory, address)

    def lay_out(self, plan: AgreedPlan, opened: Sequence[Opened]) -> Sequence[bytes]:
        """Lays out the files, and creates the directory under a temporary name.

        Returns:
            For each rank: the directory's name, its temporary name with the coordinator's view of
            the parent directory, the places of the tensors, and the rank's share if files are
            assembled.

        Raises:
            CheckpointError: the files cannot hold a value.
            FileExistsError: the directory exists and must not be replaced.
        """
        has_several_hosts = require_one_target(opened)
        assert self._directory is not None
        self.layout = layout = self._layout_of(plan)
        self._save = self.new_directory()
        created = Probe(self._save.temporary, View.of(self._directory))
        hosts = [one.directory.mounts for one in opened]
        coordinator = plan.coordinator
        shares: Sequence[Share | None] = [None] * len(opened)
        needs_one_writer = (
            layout.interleaves if created.view.takes_parallel_writes else layout.shares_files
        )
        if (
            has_several_hosts
            and all(one.address for one in opened)
            and needs_one_writer(coordinator, hosts)
        ):
            places, shares = self._shares(layout, plan, opened)
        else:
            places = layout.places_of_plan(coordinator, [one.memory for one in opened])
        names = self._save.name, created.encode()
        return [pickle.dumps((*names, *own)) for own in zip(places, shares, strict=True)]

    def new_directory(self) -> NewDirectory:
        """Creates the directory under a temporary name, on the coordinator."""
        assert self._directory is not None
        name = Path(self.path).name
        return NewDirectory(self._directory, name, self.options.overwrite, self._copied)

    def files(
        self, state: SaveState, items: bytes, layout: bytes
    ) -> tuple[OpenDirectory | StreamFolder, str, _C.SaveSources]:
        parent = self._directory
        assert parent is not None
        name, created, places, share = pickle.loads(layout)
        self.path = str(self._parent / name)
        temporary, view = Probe.decode(created)

        def open_new() -> OpenDirectory:
            with self.busy():
                return wait_for(lambda: parent.open_directory(temporary), parent, view, self._rank)

        folder: OpenDirectory | StreamFolder
        if share is None:
            folder = open_new()
        else:
            self._new = DirectoryFiles(open_new, self.options)
            path = os.path.join(parent.path, temporary)
            folder = StreamFolder(path, self._begin_assembly(share, self._new))
        return folder, "", state.parts(items, places, self._dtype)

    def written(self) -> None:
        super().written()
        if self._new is not None:
            self._new.sync()

    def write_file(self, name: str, pieces: Iterator[memoryview], bytes: int) -> None:
        assert self._save is not None
        assert self._directory is not None
        with closing(self._directory.open_directory(self._save.temporary)) as directory:
            # complete() fsyncs the file.
            write_new_file(
                directory, name, pieces, bytes, direct_io=self.options.direct_io, sync=False
            )

    def commit(self, plan: AgreedPlan, written: list[Written]) -> bytes:
        save, layout = self._save, self.layout
        assert save is not None
        assert layout is not None
        self.complete(save, layout, self.tables(written))
        self._save = None
        save.publish(self.options.sync_files)
        return b""

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
        save.complete(layout, self._copied, tables, self.options.sync_files)

    def discard(self) -> None:
        super().discard()
        save = self._save
        self._save = self._directory = self._memory = self._new = None
        if save is not None:
            save.discard()


def _is_unicode(text: object) -> bool:
    try:
        return isinstance(text, str) and text.encode() is not None
    except UnicodeEncodeError:
        return False
