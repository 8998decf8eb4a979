"""Saves in Hugging Face's layout beneath a URL.

Objects cannot be renamed, so they get their names before the save is committed. The protocol:

1. :meth:`ModelObjects.begin`, on the coordinator: lists the objects. If there are none, it creates
   the object ``.torch_ckpt-save`` on the condition that it is absent, and checks again that there
   is no model. If both succeed, the save is the *first*: its files get the names of the layout,
   which no other save uses as long as ``.torch_ckpt-save`` exists.
2. Otherwise, the save *replaces* a model, or another save is running. The names of its files have a
   tag that no other save uses, and there is an index even for a single file. If the replaced model
   is a single ``model.safetensors`` without an index, the coordinator stores an index of it, so
   that readers do not confuse its file with the new ones. The save is refused if there are objects
   that such a save does not write, or if a copied file, such as config.json, has other contents: a
   reader could get the weights of one model and the config of the other one.
3. If one rank has all parts of a file, the engine uploads the file on this rank. Every other file
   is assembled and uploaded by one rank, to which the other ranks send their parts
   (huggingface/assembly.py). No rank holds a complete tensor of several ranks, and nothing is
   stored on a local disk.
4. The coordinator creates the copied files that are absent, and the checksums. If they replace
   other checksums, they have the entries of both models.
5. The coordinator stores the index, on the condition that it has not changed since step 1. This is
   the commit. The index names the files, so a reader gets the files of one model. A first save of
   a single file has no index: it is committed by the upload of ``model.safetensors``, which is
   complete in itself.
6. If the replaced model is a single ``model.safetensors``, it is deleted now, because some readers
   prefer it to an index.
7. The coordinator stores the checksums without the other entries, and deletes the replaced objects
   and ``.torch_ckpt-save``.
8. If the save fails before step 5, the objects that it has created are deleted, except an index of
   the replaced file, and the checksums are restored. If the outcome of step 5 is unknown, no object
   is deleted.

A killed process leaves objects of steps 1 to 4. No index names them, and the next save deletes
them. If two saves to one URL run at the same time, one of them loses in step 4 or 5.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence

from torch_ckpt import _C, _core
from torch_ckpt._base.log import warn
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.directory import DirectoryIdentity
from torch_ckpt.checkpoint.marker import MARKER_NAME
from torch_ckpt.errors import CheckpointError, DurabilityUncertain, NotCommitted
from torch_ckpt.huggingface.model_target import (
    CHECKSUMS_NAME,
    INDEX_NAME,
    LocalModelTarget,
    ModelTarget,
    Safetensors,
    StrPath,
)
from torch_ckpt.options import WriteOptions
from torch_ckpt.saving.agreed_plan import AgreedPlan
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.saving.target import Opened, require_one_target
from torch_ckpt.saving.write import Written
from torch_ckpt.stores import Changed, ObjectStore, Version, open_store
from torch_ckpt.stores.folder import CLEANUP_SECONDS, ObjectFolder
from torch_ckpt.stores.store_errors import unknown_outcome
from torch_ckpt.stores.urls import check_name

_CLAIM, _SINGLE = ".torch_ckpt-save", "model.safetensors"
# Names of objects that every save may write.
_MODEL = re.compile(
    r"model(-[0-9a-f]{8})?(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json"
    r"|torch_ckpt\.checksums|torch_ckpt\.delta|config\.json"
)
# Size of the number before the header of a safetensors file, and maximum size of the header.
_SIZE_BYTES, _HEADER_BYTES = 8, 100_000_000
# Maximum size of the checksums that are replaced.
_CHECKSUMS_BYTES = 1 << 28


class ObjectModelTarget(ModelTarget):
    """The objects of a model beneath a URL; see the module's docstring.

    Args:
        store: the objects.
        format, options: see :class:`ModelTarget`.

    Raises:
        ValueError: the name of a file to copy is not allowed.
    """

    def __init__(self, store: ObjectStore, format: Safetensors, options: WriteOptions) -> None:
        super().__init__(store.root.url, format, options)
        self._store = store
        for name in self._copied:
            check_name(name)
        self._folder: ObjectFolder | None = None
        # Set on the coordinator.
        self._save: ModelObjects | None = None

    def open(self, rank: int, ranks: int) -> Opened:
        self.discard()
        self._rank = rank
        identity = DirectoryIdentity.of(ObjectFolder(self._store))
        address = self._listen() if ranks > 1 else b""
        return Opened(identity, self._describe(), address=address)

    def lay_out(self, plan: AgreedPlan, opened: Sequence[Opened]) -> Sequence[bytes]:
        """Chooses the names of the objects.

        Returns:
            For each rank: the places of its parts, and its share in the assembly of files.

        Raises:
            CheckpointError: the files cannot hold a value, or a copied file cannot be replaced.
            FileExistsError: there are objects that must not be replaced.
            OSError: a request failed.
        """
        require_one_target(opened)
        self._save = save = ModelObjects(self._store, self._copied)
        self.begin(save)
        self.layout = layout = self._layout_of(plan, "" if save.is_first else save.tag)
        save.add_files([name for name, _ in layout.files()])
        return [pickle.dumps(own) for own in zip(*self._shares(layout, plan, opened), strict=True)]

    def begin(self, save: ModelObjects) -> None:
        """Begins the coordinator's part."""
        save.begin(self.options.overwrite)

    def files(
        self, state: SaveState, items: bytes, layout: bytes
    ) -> tuple[ObjectFolder, str, _C.SaveSources]:
        places, share = pickle.loads(layout)
        has_share = share.sent or share.assembled
        streams = self._begin_assembly(share, self._store) if has_share else None
        self._folder = ObjectFolder(self._store, streams)
        return self._folder, "", state.parts(items, places, self._dtype)

    def undo(self, written: Written) -> None:
        assert self._folder is not None
        self._folder.remove_written()
        if self._assembly is not None:
            _delete_or_warn(self._store, self._assembly.names)

    def write_file(self, name: str, pieces: Iterator[memoryview], bytes: int) -> None:
        self._store.put(name, pieces, bytes)

    def commit(self, plan: AgreedPlan, written: list[Written]) -> bytes:
        save, layout = self._save, self.layout
        assert save is not None
        assert layout is not None
        with self.busy():
            self.complete(save, layout, self.tables(written))
        return b""

    def complete(
        self, save: ModelObjects, layout: _core.SafetensorsLayout, tables: list[dict[str, bytes]]
    ) -> None:
        """Commits the save, on the coordinator.

        Args:
            tables: the encoded checksums that each rank has sent, by file.
        """
        save.commit(layout, tables)

    def discard(self) -> None:
        super().discard()
        folder, save = self._folder, self._save
        self._folder = self._save = None
        if folder is not None:
            folder.close()
        if save is not None:
            save.discard()


def model_target(
    path: StrPath, format: Safetensors, options: WriteOptions
) -> LocalModelTarget | ObjectModelTarget:
    """Returns the target of a model in a local directory or beneath a URL."""
    if is_url(path):
        return ObjectModelTarget(open_store(str(path), options.storage_options), format, options)
    return LocalModelTarget(path, format, options)


class ModelObjects:
    """The coordinator's part of a save of objects; see the module's docstring.

    If it is dropped before the commit, the objects of the save are deleted.

    Args:
        store: the objects.
        copied: names and contents of the files to copy.

    Attributes:
        tag: part of names that no other save uses.
        is_first: True if the files have the names of the layout.
    """

    def __init__(self, store: ObjectStore, copied: Mapping[str, bytes]) -> None:
        self.tag = uuid.uuid4().hex[:8]
        self.is_first = False
        self._store = store
        self._copied = dict(copied)
        # The objects that were there, and the versions of those that may be replaced.
        self._found: set[str] = set()
        self._equal: set[str] = set()  # the copied files that were there
        self._versions: dict[str, Version] = {}
        self._former: bytes | None = None  # the former checksums
        self._undone = _Undone(store)
        self._discard = weakref.finalize(self, self._undone.undo)

    def begin(self, replace: bool, *, is_hidden: bool = False) -> None:
        """Performs 1 and 2.

        Args:
            replace: replace a model.
            is_hidden: readers ignore the objects, because the marker is missing.
        """
        if not self._find(replace, is_hidden) and self._claim():
            self.is_first = not any(map(self._store.find, (INDEX_NAME, _SINGLE)))
            if not self.is_first:
                self._find(replace, is_hidden)

    def add_files(self, files: list[str]) -> None:
        """Adds the names of the objects that the ranks write."""
        self._undone.names.update(files)

    def commit(
        self,
        layout: _core.SafetensorsLayout,
        tables: list[dict[str, bytes]],
        marker: bytes | None = None,
    ) -> None:
        """Performs 4 to 7.

        Args:
            tables: the encoded checksums that each rank has sent, by file.
            marker: contents of the marker, which commits the save instead of the index.

        Raises:
            NotCommitted: nothing was committed, and the replaced model is intact.
            DurabilityUncertain: the model might be visible already, or later.
        """
        extras = dict(self._copied)
        if marker is not None:
            extras[MARKER_NAME] = marker
        if layout.index:
            extras[INDEX_NAME] = layout.index
        checksums = layout.checksums([*extras.items()], tables)
        names = {name for name, _ in layout.files()} | extras.keys() | {CHECKSUMS_NAME}
        last = INDEX_NAME if marker is None else MARKER_NAME
        committed = extras.pop(last, None)
        try:
            if marker is not None and self._store.find(MARKER_NAME) is not None:
                raise self._exists("another process has completed it")
            self._prepare(extras, checksums)
            if marker is not None:
                self._hide_former()
                self._require(names - {MARKER_NAME})
        except OSError as error:
            raise self._not_committed(error) from None
        try:
            if committed is not None:
                self._put(last, committed)
        except OSError as error:
            if not unknown_outcome(error):
                raise self._not_committed(error) from None
            self._discard.detach()
            raise DurabilityUncertain(str(error), error.errno or errno.EIO) from None
        self._discard.detach()
        if marker is None:
            self._hide_former()
        self._clean_up(names, checksums)

    def discard(self) -> None:
        """Performs 8, unless the save is committed."""
        self._discard()

    # --- private ---------------------------------------------------------------------------------

    def _find(self, replace: bool, is_hidden: bool) -> set[str]:
        """Returns the names of the objects that there are, without leftovers of killed saves."""
        known = self._read_checksums() | self._copied.keys()
        for entry in self._store.list():
            if entry.name not in known | {_CLAIM} and not _MODEL.fullmatch(entry.name):
                raise self._exists(
                    "there is an object that this save would not write, so nothing was replaced; "
                    "choose another URL, or delete the object",
                    entry.name,
                )
            self._found.add(entry.name)
        present = self._found - {_CLAIM}
        if present and not replace:
            raise self._exists("it exists already; pass overwrite=True to replace it")
        for name in self._copied.keys() & present:
            self._compare(name, is_hidden)
        if INDEX_NAME in present:
            self._versions[INDEX_NAME] = self._store.head(INDEX_NAME).version
        elif _SINGLE in present:
            self._index_former()
        return present

    def _index_former(self) -> None:
        """Stores an index of the single file that is replaced, unless the file is damaged."""
        entry = self._store.head(_SINGLE)
        version, most = entry.version, min(entry.bytes - _SIZE_BYTES, _HEADER_BYTES)
        if most < 0:
            return
        size = int.from_bytes(self._store.read_range(_SINGLE, 0, _SIZE_BYTES, version), "little")
        if size > most:
            return
        header = bytes(self._store.read_range(_SINGLE, _SIZE_BYTES, size, version))
        try:
            names = json.loads(header).keys() - {"__metadata__"}
        except (ValueError, AttributeError, RecursionError):
            return
        index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(names), _SINGLE)}
        data = json.dumps(index, indent=2).encode()
        # It stays if the save fails, because another save may have replaced it by then.
        self._versions[INDEX_NAME] = self._store.exchange(INDEX_NAME, data, None)

    def _claim(self) -> bool:
        """Returns True if this save has created the object that only one save can create."""
        try:
            self._put(_CLAIM, self.tag.encode())
        except (FileExistsError, Changed):
            return False
        return True

    def _read_checksums(self) -> set[str]:
        """Returns the names of the files in the stored checksums."""
        try:
            data, version = self._store.read(CHECKSUMS_NAME, _CHECKSUMS_BYTES)
        except FileNotFoundError:
            return set()
        self._versions[CHECKSUMS_NAME] = version
        try:
            names = set(_core.names_in_checksums(data))
        except CheckpointError as error:
            warn(f"{self._store.url_of(CHECKSUMS_NAME)} is damaged, and will be replaced: {error}")
            return set()
        self._former = data
        return names

    def _compare(self, name: str, is_hidden: bool) -> None:
        """Compares a copied file with the store. Raises CheckpointError if the contents differ and
        readers may see them."""
        version = self._store.head(name).version
        contents = self._copied[name]
        try:
            is_equal = self._store.read(name, len(contents))[0] == contents
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            is_equal = False
        if is_equal:
            self._equal.add(name)
        elif is_hidden:
            self._versions[name] = version
        else:
            raise CheckpointError(
                f"{self._store.url_of(name)} has other contents than the file to copy, and objects "
                "cannot be replaced together with the weights. Save to another URL, or delete the "
                "model first"
            )

    def _exists(self, text: str, name: str = "") -> FileExistsError:
        return FileExistsError(errno.EEXIST, f"save failed: {text}", self._store.url_of(name))

    def _prepare(self, extras: dict[str, bytes], checksums: bytes) -> None:
        """Performs 4."""
        for name in extras.keys() - self._equal:
            self._put(name, extras[name])
        if self._former is not None:
            checksums = _core.join_checksums(self._former, checksums)
            self._undone.former = self._former
        self._versions[CHECKSUMS_NAME] = self._put(CHECKSUMS_NAME, checksums)
        self._undone.checksums = self._versions[CHECKSUMS_NAME]

    def _require(self, names: set[str]) -> None:
        """Raises FileNotFoundError if another process has deleted an object of this save."""
        missing = names - {entry.name for entry in self._store.list()}
        if missing:
            raise FileNotFoundError(
                errno.ENOENT,
                "commit failed: another process has deleted this object; make sure that only one "
                "job saves to this URL",
                self._store.url_of(min(missing)),
            )

    def _hide_former(self) -> None:
        """Performs 6."""
        if _SINGLE not in self._found:
            return
        try:
            self._store.delete([_SINGLE])
        except OSError as error:
            raise DurabilityUncertain(
                f"{self._store.root.url}: the index is stored, but the former {_SINGLE}, which "
                f"some readers prefer, could not be deleted: {error}",
                error.errno or errno.EIO,
            ) from None

    def _put(self, name: str, data: bytes) -> Version:
        """Creates an object, or replaces the version that was there when the save began."""
        version = self._store.exchange(name, data, self._versions.get(name))
        if name not in self._versions:
            self._undone.names.add(name)
        return version

    def _not_committed(self, error: OSError) -> NotCommitted:
        if isinstance(error, (FileExistsError, Changed)):
            return NotCommitted(
                f"{self._store.root.url}: another save has stored a model here since this save "
                "began; make sure that only one job saves to this URL"
            )
        return NotCommitted(str(error), error.errno or errno.EIO)

    def _clean_up(self, names: set[str], checksums: bytes) -> None:
        """Performs 7.

        Args:
            names: names of the objects of the model.
        """
        try:
            if self._former is not None:
                self._put(CHECKSUMS_NAME, checksums)
            self._store.delete(sorted((self._found - names) | {_CLAIM}))
        except OSError as error:
            warn(f"{self._store.root.url}: objects that are not needed any more remain: {error}")


class _Undone:
    """The changes of a failed save that are undone.

    Attributes:
        names: objects to delete.
        checksums: version of the checksums that the save has stored.
        former: the checksums to restore.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._pid = os.getpid()
        self.names: set[str] = set()
        self.checksums: Version | None = None
        self.former: bytes | None = None

    def undo(self) -> None:
        # The parent of a forked child may continue the save.
        if os.getpid() != self._pid:
            return
        _delete_or_warn(self._store, sorted(self.names))
        if self.former is None or self.checksums is None:
            return
        brief = self._store.within(CLEANUP_SECONDS)
        try:
            brief.exchange(CHECKSUMS_NAME, self.former, self.checksums)
        except OSError as error:
            warn(f"{self._store.root.url}: the checksums have entries of a failed save: {error}")


def _delete_or_warn(store: ObjectStore, names: list[str]) -> None:
    try:
        store.within(CLEANUP_SECONDS).delete(names)
    except OSError as error:
        warn(f"{store.root.url}: objects of a failed save may remain: {error}")
