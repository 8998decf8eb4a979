"""Times saves to and loads from an S3 server, compared with obstore and with s3torchconnector.

The server is SeaweedFS on loopback, with and without a proxy that delays each round trip and limits
the rate of each connection. obstore moves the same bytes without checksums: multipart puts as four
objects at once with four parts in flight, and ranges of 8 MiB in 8 threads that are copied to the
tensors. s3torchconnector's writer and reader are used under ``dcp.save`` and ``dcp.load``.

Each round starts a server with empty volumes and warms up with 64 MiB. Each rank has its part of
the bytes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import torch_ckpt
from scripts import object_servers

from . import fresh_process, ranks, slow_network
from .groups import Run
from .measure import Sample, time_once
from .memory import measure_growth
from .results import ContenderInfo, readable_size

_TENSORS, _OBJECTS = 32, 4
_PART, _RANGE = 16 << 20, 8 << 20
_WARM_UP_BYTES = 64 << 20
_DELAY_MS, _MEGABYTES_PER_SECOND = 20, 100  # of a round trip; of each connection

Operation = Callable[[], object]


class Contenders:
    """The operations of all contenders on this rank's part of a state."""

    def __init__(self, options: dict[str, str], size: int, rank: int, ranks: int) -> None:
        self.options, self.bucket, self.rank = options, object_servers.BUCKET, rank
        elements = size // 4 // _TENSORS // ranks
        names = [f"weight {number} of rank {rank}" for number in range(_TENSORS)]
        self.state = {name: torch.randn(elements) for name in names}
        self.target = {name: torch.zeros_like(value) for name, value in self.state.items()}

    def operations(self) -> dict[str, Operation]:
        """Returns the saves, and the loads of what they saved, by the names of contenders."""
        found = {
            "torch_ckpt_save": self.save,
            "obstore_save": self.put,
            "s3torchconnector_save": self.save_by_connector,
            "torch_ckpt_load": self.load,
            "obstore_load": self.get,
            "s3torchconnector_load": self.load_by_connector,
        }
        has_connector = importlib.util.find_spec("s3torchconnector") is not None
        return {n: work for n, work in found.items() if has_connector or "connector" not in n}

    def save(self) -> None:
        options = torch_ckpt.WriteOptions(storage_options=self.options)
        torch_ckpt.save(self.state, f"s3://{self.bucket}/ours", options=options)

    def load(self) -> None:
        options = torch_ckpt.ReadOptions(storage_options=self.options)
        torch_ckpt.load(self.target, f"s3://{self.bucket}/ours", options=options)

    def _store(self) -> Any:
        from obstore.store import S3Store

        return S3Store(
            self.bucket,
            access_key_id=self.options["key"],
            secret_access_key=self.options["secret"],
            endpoint=self.options["endpoint_url"],
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def _bytes_of(self, state: dict[str, torch.Tensor], number: int) -> list[memoryview]:
        """Returns the bytes of the tensors of one object."""
        return [tensor.numpy().data.cast("B") for tensor in state.values()][number::_OBJECTS]

    def put(self) -> None:
        import obstore

        store = self._store()

        def put(number: int) -> None:
            pieces = iter(self._bytes_of(self.state, number))
            obstore.put(
                store, f"bare/{self.rank}/{number}", pieces, use_multipart=True, chunk_size=_PART,
                max_concurrency=4,
            )  # fmt: skip

        with ThreadPoolExecutor(_OBJECTS) as threads:
            list(threads.map(put, range(_OBJECTS)))

    def get(self) -> None:
        import obstore

        store = self._store()
        ranges = []
        for number in range(_OBJECTS):
            at = 0
            for view in self._bytes_of(self.target, number):
                for begin in range(0, len(view), _RANGE):
                    end = min(begin + _RANGE, len(view))
                    ranges.append((f"bare/{self.rank}/{number}", at + begin, view[begin:end]))
                at += len(view)

        def get(place: tuple[str, int, memoryview]) -> None:
            key, begin, view = place
            view[:] = memoryview(obstore.get_range(store, key, start=begin, length=len(view)))

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(get, ranges))

    def _connector(self, kind: str) -> Any:
        connector = importlib.import_module("s3torchconnector")
        of_dcp = importlib.import_module("s3torchconnector.dcp")
        os.environ["AWS_ACCESS_KEY_ID"] = self.options["key"]
        os.environ["AWS_SECRET_ACCESS_KEY"] = self.options["secret"]
        os.environ["AWS_ENDPOINT_URL"] = self.options["endpoint_url"]
        made = {"writer": of_dcp.S3StorageWriter, "reader": of_dcp.S3StorageReader}[kind]
        path = f"s3://{self.bucket}/connector/"
        return made(
            "us-east-1", path, s3client_config=connector.S3ClientConfig(force_path_style=True)
        )

    def save_by_connector(self) -> None:
        dcp_save(self.state, storage_writer=self._connector("writer"))

    def load_by_connector(self) -> None:
        dcp_load(self.target, storage_reader=self._connector("reader"))


def _on_rank(options: dict[str, str], size: int, result: Path) -> None:
    samples: list[Sample] = []
    for total in (_WARM_UP_BYTES, size):
        operations = Contenders(options, total, dist.get_rank(), dist.get_world_size()).operations()
        samples = []
        for name, operation in operations.items():
            wall, cpu = time_once(operation, dist.barrier)
            samples.append({"contender": name, "round": 0, "wall_s": wall, "cpu_s": cpu})
    merged = ranks.merge(samples)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(merged))


def measure_peak(options: dict[str, str], size: int, name: str) -> int:
    """Returns the growth of this process in one operation, in bytes."""
    before, peak = measure_growth(Contenders(options, size, 0, 1).operations()[name])
    return peak - before


@contextmanager
def _empty_server(is_slow: bool) -> Iterator[dict[str, str]]:
    """Yields settings for clients."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(object_servers.running("seaweedfs", directory))
        options = dict(server.options)
        if is_slow:
            port = int(options["endpoint_url"].rpartition(":")[2])
            slow = stack.enter_context(slow_network.running(port, _DELAY_MS, _MEGABYTES_PER_SECOND))
            options["endpoint_url"] = f"http://127.0.0.1:{slow}"
        yield options


def use_object_stores(run: Run) -> None:
    """Times saves and loads on one rank and on two, and measures their memory."""
    size = run.effort.state_bytes
    what = f"SeaweedFS, {readable_size(size)}"
    network = f"{_DELAY_MS} ms, {_MEGABYTES_PER_SECOND} MB/s for each connection"
    infos: list[ContenderInfo] = []
    for group, title, world, is_slow in (
        ("objects_slow", f"{what}, {network}", 1, True),
        ("objects_slow_ranks", f"{what}, {network}, 2 ranks", 2, True),
        ("objects", f"{what}, loopback", 1, False),
    ):
        run.begin(title)
        samples: list[Sample] = []
        with run.scratch(group) as scratch:
            for number in range(run.effort.rounds):
                with _empty_server(is_slow) as options:
                    ranks.run(world, partial(_on_rank, options, size, scratch / "samples.json"))
                for sample in json.loads((scratch / "samples.json").read_text()):
                    samples.append({**sample, "round": number})
                    run.show(sample["contender"], samples[-1])
        infos = [
            ContenderInfo(name, f"{who}, {kind}", "ours" if who == "torch_ckpt" else "peer")
            for name in dict.fromkeys(str(sample["contender"]) for sample in samples)
            for who, _, kind in [name.rpartition("_")]
        ]
        run.add(group, title, size, infos, samples)
    growths: list[Sample] = []
    with _empty_server(is_slow=True) as options:
        for info in infos:
            growth = fresh_process.run(measure_peak, options, size, info.name)
            growths.append({"contender": info.name, "round": 0, "growth_bytes": growth})
    run.add("memory_objects", f"Memory beyond the state, {what}", size, infos, growths)
