"""What the attacks share: a good checkpoint to spoil, the readers to try it on, and a table.

An attack is a function that spoils the checkpoint. Each is tried on our readers, which must stop
it, and on torch's own, of which only what it does is noted. The table is printed at the end of the
session, and written as ``attacks.json`` into the directory that TORCH_CKPT_RESULTS names.
"""

from __future__ import annotations

import copy
import dataclasses
import faulthandler
import io
import json
import os
import pickle
import resource
import select
import signal
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import torch_ckpt
from tests.support import assert_equal, cause_of, save, stock_save
from torch_ckpt import cli
from torch_ckpt.checkpoint.metadata import read_metadata

#: A reader that has not answered by then hangs.
PATIENCE_SECONDS = 5

#: What a stopped attack may cost: less than what any of them asks for.
MOST_MEMORY = 512 << 20

#: attack -> {"ours": ..., "stock": ...}
TABLE: dict[str, dict[str, str]] = {}

Attack = Callable[["Checkpoint"], None]


class Calls:
    """A pickle that calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Checkpoint:
    """A checkpoint of two tensors and an object, to be spoiled.

    Attributes:
        path: its directory.
        canary: a file that appears when an attack's payload runs.
        metadata: what it says; :meth:`publish` writes it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "checkpoint"
        self.folder = folder
        self.canary = folder / "canary"
        self.state: dict[str, Any] = {
            "weight": torch.arange(12.0).reshape(3, 4),
            "bias": torch.arange(4.0) + 100,
            "step": 7,
        }
        save(self.state, self.path, thread_count=1)
        self.metadata: Metadata = read_metadata(self.path)

    def of_stock(self) -> None:
        """Starts anew with one that torch has written: without checksums."""
        for file in self.path.iterdir():
            file.unlink()
        stock_save(self.state, self.path)
        self.metadata = read_metadata(self.path)

    @property
    def data(self) -> Path:
        """Its data file."""
        (file,) = self.path.glob("*.distcp")
        return file

    def place(self, name: str) -> _StorageInfo:
        """Where something is stored; to be changed before :meth:`publish`."""
        (place,) = (i for index, i in self.metadata.storage_data.items() if index.fqn == name)
        return place

    def put(self, place: _StorageInfo, name: str) -> None:
        """Replaces a place."""
        (index,) = (index for index in self.metadata.storage_data if index.fqn == name)
        self.metadata.storage_data[index] = place

    def publish(self) -> None:
        """Writes the metadata as it is now."""
        self.publish_bytes(pickle.dumps(self.metadata))

    def publish_bytes(self, content: bytes) -> None:
        """Writes whatever it is as the metadata."""
        (self.path / ".metadata").write_bytes(content)

    def replace_record(self, name: str, record: bytes) -> None:
        """Stores something else under a name, without checksums of it."""
        vars(self.metadata).pop("torch_ckpt", None)
        (self.path / "other.distcp").write_bytes(record)
        self.put(_StorageInfo("other.distcp", 0, len(record)), name)
        self.publish()

    def touches_canary(self) -> Calls:
        """The payload of an attack."""
        return Calls(os.system, f"touch {self.canary}")

    # --- readers ---------------------------------------------------------------------------------

    def targets(self) -> dict[str, Any]:
        """What is loaded into."""
        return {"weight": torch.full((3, 4), -1.0), "bias": torch.full((4,), -1.0), "step": None}

    def assert_stopped(
        self,
        attack: str,
        *kinds: type[BaseException],
        ls: int = 2,
        unchanged: bool = True,
        targets: Callable[[], dict[str, Any]] | None = None,
        says: str = "",
    ) -> None:
        """Fails unless both of our loads refuse it, and neither they nor ``torch-ckpt ls`` run it.

        Args:
            kinds: of the error.
            ls: exit code of the command.
            unchanged: whether the targets must be what they were. Not where one of several tensors
                turns out to be damaged while they are read.
            targets: what to load into.
            says: a part of the message.
        """
        row = TABLE.setdefault(attack, {})
        row["ours"] = "not stopped"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = set()
        for load in (self._dcp_load, self._our_load):
            state = (targets or self.targets)()
            before = copy.deepcopy(state)
            with pytest.raises(dcp.CheckpointException) as error:
                load(state)
            cause = cause_of(error.value)
            assert isinstance(cause, kinds), f"{type(cause).__name__}: {cause}"
            assert says in str(cause)
            assert len(str(cause)) < 2000, "one sentence"
            if unchanged:
                assert_equal(state, before)
            found.add(type(cause).__name__)
        assert cli.main(["ls", str(self.path)]) == ls
        assert not self.canary.exists(), "the payload ran"
        used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
        assert used < MOST_MEMORY, f"{used} bytes of memory"
        row["ours"] = "stopped: " + ", ".join(sorted(found))

    def note_stock(
        self,
        attack: str,
        *,
        targets: Callable[[], dict[str, Any]] | None = None,
        worked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Notes what torch's own reader does with it.

        Args:
            targets: what to load into.
            worked: whether the attacker has got what he wanted, where that is not the canary.
        """

        def load() -> None:
            state = (targets or self.targets)()
            dcp.load(state, storage_reader=dcp.FileSystemReader(self.path), no_dist=True)

        outcome = in_child(load, worked)
        if self.canary.exists():
            outcome = "executed"
        TABLE.setdefault(attack, {})["stock"] = outcome

    def _dcp_load(self, state: dict[str, Any]) -> None:
        reader = torch_ckpt.FileSystemReader(self.path)
        dcp.load(state, storage_reader=reader, no_dist=True)

    def _our_load(self, state: dict[str, Any]) -> None:
        torch_ckpt.load(state, self.path, no_dist=True)


def in_child(work: Callable[[], None], worked: Callable[[], bool] = lambda: False) -> str:
    """What comes of it in a process of its own, which may hang, die or want all memory."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            # It may crash, and nobody wants to see where.
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            limit = 16 << 30
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            outcome = "read"
            try:
                work()
            except BaseException as error:
                cause = cause_of(error) if isinstance(error, dcp.CheckpointException) else error
                outcome = f"raised {type(cause).__name__}"
            if worked():
                outcome = "executed"
            os.write(writing, outcome.encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], PATIENCE_SECONDS)
        if not ready:
            os.kill(child, signal.SIGKILL)
            return "hung"
        return os.read(reading, 1000).decode() or "died"
    finally:
        os.close(reading)
        os.waitpid(child, 0)


def record_of_object(value: Any) -> bytes:
    """The record that DCP's planner makes of an object."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def with_entry(record: bytes, name: str, content: bytes) -> bytes:
    """The archive of ``torch.save`` with another entry of a name."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(record)) as old, zipfile.ZipFile(stream, "w") as new:
        for entry in old.infolist():
            is_it = entry.filename.partition("/")[2] == name
            new.writestr(entry.filename, content if is_it else old.read(entry))
    return stream.getvalue()


def replaced(metadata: Metadata, name: str, **fields: Any) -> None:
    """Gives a name's description other fields."""
    stored = metadata.state_dict_metadata[name]
    metadata.state_dict_metadata[name] = dataclasses.replace(stored, **fields)


def index_of(metadata: Metadata, name: str) -> MetadataIndex:
    """The only index of a name."""
    (index,) = (index for index in metadata.storage_data if index.fqn == name)
    return index


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """With another file mode creation mask."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def summary() -> str:
    """The table in one line."""
    stopped = sum(row.get("ours", "").startswith("stopped") for row in TABLE.values())
    tried = sum("ours" in row for row in TABLE.values())
    stock = Counter(row["stock"].split(" ")[0] for row in TABLE.values() if "stock" in row)
    theirs = ", ".join(f"{count} {what}" for what, count in stock.most_common())
    return f"attacks: {tried} tried, {stopped} stopped; stock: {theirs or 'not tried'}"


def write_results() -> None:
    """Writes the table where TORCH_CKPT_RESULTS says."""
    folder = os.environ.get("TORCH_CKPT_RESULTS")
    if folder:
        rows = [{"attack": attack, **row} for attack, row in sorted(TABLE.items())]
        content = json.dumps({"summary": summary(), "attacks": rows}, indent=2)
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "attacks.json").write_text(content + "\n")
