"""Helpers for the attacks: a valid checkpoint to modify, readers to try, and a table.

An attack is a function that modifies the checkpoint. Our readers must stop it. The outcome of
torch's own reader is only recorded. The table is printed at the end of the session, and written as
``attacks.json`` to the directory in TORCH_CKPT_RESULTS.
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
from tests.forked import Answering
from tests.metadata import read_metadata
from tests.support import assert_equal, cause_of, save, stock_save
from torch_ckpt import cli

#: Seconds after which a reader is considered to hang.
PATIENCE_SECONDS = 5

#: Limit of the memory that a stopped attack may use, less than any attack tries to use.
MOST_MEMORY = 512 << 20

#: attack -> {"ours": ..., "stock": ...}
TABLE: dict[str, dict[str, str]] = {}

Attack = Callable[["Checkpoint"], None]


class Calls:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Checkpoint:
    """A checkpoint of two tensors and an object, for attacks to modify.

    Attributes:
        path: the checkpoint's directory.
        canary: a file that the payload of an attack creates.
        metadata: the metadata; :meth:`publish` writes it.
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

    def save_with_torch(self) -> None:
        """Replaces the checkpoint by one that torch writes, without checksums."""
        for file in self.path.iterdir():
            file.unlink()
        stock_save(self.state, self.path)
        self.metadata = read_metadata(self.path)

    @property
    def data(self) -> Path:
        """The data file."""
        (file,) = self.path.glob("*.distcp")
        return file

    def location(self, name: str) -> _StorageInfo:
        """Returns the location of an item, which may be changed before :meth:`publish`."""
        (location,) = (i for index, i in self.metadata.storage_data.items() if index.fqn == name)
        return location

    def set_location(self, location: _StorageInfo, name: str) -> None:
        """Replaces the location of an item."""
        (index,) = (index for index in self.metadata.storage_data if index.fqn == name)
        self.metadata.storage_data[index] = location

    def publish(self) -> None:
        """Writes the metadata."""
        self.publish_bytes(pickle.dumps(self.metadata))

    def publish_bytes(self, content: bytes) -> None:
        """Writes any bytes as the metadata."""
        (self.path / ".metadata").write_bytes(content)

    def replace_record(self, name: str, record: bytes) -> None:
        """Stores another record under a name, without checksums."""
        vars(self.metadata).pop("torch_ckpt", None)
        (self.path / "other.distcp").write_bytes(record)
        self.set_location(_StorageInfo("other.distcp", 0, len(record)), name)
        self.publish()

    def make_payload(self) -> Calls:
        """Returns an object whose pickle creates the canary."""
        return Calls(os.system, f"touch {self.canary}")

    # --- readers ---------------------------------------------------------------------------------

    def targets(self) -> dict[str, Any]:
        """Returns a state dict to load into."""
        return {"weight": torch.full((3, 4), -1.0), "bias": torch.full((4,), -1.0), "step": None}

    def assert_stopped(
        self,
        attack: str,
        *kinds: type[BaseException],
        ls: int = 2,
        unchanged: bool = True,
        targets: Callable[[], dict[str, Any]] | None = None,
        message: str = "",
    ) -> None:
        """Asserts that both of our loads reject the checkpoint, and that neither they nor
        ``torch-ckpt ls`` run the payload.

        Args:
            attack: name of the attack in the table.
            kinds: allowed types of the error.
            ls: exit code of the command.
            unchanged: True if the targets must not change; False if damage is found only while
                tensors are read.
            targets: returns the state dict to load into.
            message: part of the error message.
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
            assert message in str(cause)
            assert len(str(cause)) < 2000, "one sentence"
            if unchanged:
                assert_equal(state, before)
            found.add(type(cause).__name__)
        assert cli.main(["ls", str(self.path)]) == ls
        assert not self.canary.exists(), "the payload ran"
        used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
        assert used < MOST_MEMORY, f"{used} bytes of memory"
        row["ours"] = "stopped: " + ", ".join(sorted(found))

    def record_stock(
        self,
        attack: str,
        *,
        targets: Callable[[], dict[str, Any]] | None = None,
        worked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Records the outcome of torch's own reader.

        Args:
            attack: name of the attack in the table.
            targets: returns the state dict to load into.
            worked: returns True if the attack succeeded, for attacks that do not create the canary.
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
    """Runs ``work`` in a child, which may hang, die or use much memory. Returns the outcome."""

    def attempt(_send: object) -> str:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        # Print no traceback of an expected crash.
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
        return "executed" if worked() else outcome

    child = Answering(attempt)
    try:
        return child.answer(PATIENCE_SECONDS) or "died"
    except TimeoutError:
        return "hung"
    finally:
        child.kill()


def record_of_object(value: Any) -> bytes:
    """Returns the record that DCP's planner makes for an object."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def with_entry(record: bytes, name: str, content: bytes) -> bytes:
    """Returns the archive of ``torch.save`` with one entry replaced."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(record)) as old, zipfile.ZipFile(stream, "w") as new:
        for entry in old.infolist():
            matches = entry.filename.partition("/")[2] == name
            new.writestr(entry.filename, content if matches else old.read(entry))
    return stream.getvalue()


def replaced(metadata: Metadata, name: str, **fields: Any) -> None:
    """Replaces fields in the description of a name."""
    stored = metadata.state_dict_metadata[name]
    metadata.state_dict_metadata[name] = dataclasses.replace(stored, **fields)


def index_of(metadata: Metadata, name: str) -> MetadataIndex:
    """Returns the only index of a name."""
    (index,) = (index for index in metadata.storage_data if index.fqn == name)
    return index


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Sets the file mode creation mask for the time of a block."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def summary() -> str:
    """Returns a summary of the table in one line."""
    stopped = sum(row.get("ours", "").startswith("stopped") for row in TABLE.values())
    tried = sum("ours" in row for row in TABLE.values())
    stock = Counter(row["stock"].split(" ")[0] for row in TABLE.values() if "stock" in row)
    theirs = ", ".join(f"{count} {what}" for what, count in stock.most_common())
    return f"attacks: {tried} tried, {stopped} stopped; stock: {theirs or 'not tried'}"


def write_results() -> None:
    """Writes the table to the directory in TORCH_CKPT_RESULTS, if it is set."""
    folder = os.environ.get("TORCH_CKPT_RESULTS")
    if folder:
        rows = [{"attack": attack, **row} for attack, row in sorted(TABLE.items())]
        content = json.dumps({"summary": summary(), "attacks": rows}, indent=2)
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "attacks.json").write_text(content + "\n")
