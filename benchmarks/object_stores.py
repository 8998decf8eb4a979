"""Saves to and loads from an S3 server, compared with obstore and with s3torchconnector.

``python -m benchmarks.run object_stores [--megabytes 1024] [--rounds 9] [--delay-ms 20 --rate 100]
[--ranks 2]`` starts SeaweedFS on loopback. With ``--delay-ms``, all contenders go through a proxy
with a delay for each round trip and ``--rate`` megabytes a second for each connection.

- obstore: multipart puts of the same bytes, as four objects at once with four parts in flight, and
  ranges of 8 MiB in 8 threads that are copied to the tensors. Without checksums.
- s3torchconnector: its writer under ``dcp.save``, and its reader under ``dcp.load``, as they come.

Each round starts a server with empty volumes and warms up with 64 MiB. Then the contenders take
turns, in the same processes. Each rank has its part of the bytes. Seconds are those of the slowest
rank, CPU seconds those of rank 0. The ratios are medians over the rounds of the time of a contender
divided by ours, so more than 1 means that torch_ckpt is faster. Memory is the growth of the peak
during one operation in a fresh process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
from benchmarks import fresh_process, ranks, slow_network
from benchmarks.memory import measure_growth
from scripts import object_servers

_TENSORS, _OBJECTS = 32, 4
_PART, _RANGE = 16 << 20, 8 << 20
_WARM_UP_MEGABYTES = 64

Operation = Callable[[], object]
#: Seconds and CPU seconds of one round, by operation and contender.
Times = dict[str, tuple[float, float]]


class Contenders:
    """The operations of all contenders on this rank's part of a state."""

    def __init__(self, options: dict[str, str], megabytes: int, rank: int, ranks: int) -> None:
        self.options, self.bucket, self.rank = options, object_servers.BUCKET, rank
        elements = (megabytes << 20) // 4 // _TENSORS // ranks
        names = [f"weight {number} of rank {rank}" for number in range(_TENSORS)]
        self.state = {name: torch.randn(elements) for name in names}
        self.target = {name: torch.zeros_like(value) for name, value in self.state.items()}

    def operations(self) -> dict[str, dict[str, Operation]]:
        found: dict[str, dict[str, Operation]] = {
            "save": {"torch_ckpt": self.save, "obstore": self.put},
            "load": {"torch_ckpt": self.load, "obstore": self.get},
        }
        if importlib.util.find_spec("s3torchconnector") is None:
            return found
        found["save"]["s3torchconnector"] = self.save_by_connector
        found["load"]["s3torchconnector"] = self.load_by_connector
        return found

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


def _measured(operation: Operation) -> tuple[float, float]:
    """Returns seconds until all ranks are done, and CPU seconds of this process."""
    _barrier()
    begun, cpu = time.perf_counter(), time.process_time()
    operation()
    cpu = time.process_time() - cpu
    _barrier()
    return time.perf_counter() - begun, cpu


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _alternately(options: dict[str, str], megabytes: int, rank: int, ranks: int) -> Times:
    measured: Times = {}
    for size in (_WARM_UP_MEGABYTES, megabytes):
        contenders = Contenders(options, size, rank, ranks)
        for kind, operations in contenders.operations().items():
            for name, operation in operations.items():
                measured[f"{kind}, {name}"] = _measured(operation)
    return measured


def _on_rank(options: dict[str, str], megabytes: int, result: Path) -> None:
    times = _alternately(options, megabytes, dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        result.write_text(json.dumps(times))


def _on_ranks(options: dict[str, str], megabytes: int, count: int, directory: Path) -> Times:
    result = directory / "times.json"
    ranks.run(count, partial(_on_rank, options, megabytes, result))
    times: Times = json.loads(result.read_text())
    return times


def measure_peak(options: dict[str, str], megabytes: int, title: str) -> float:
    """Returns the growth of this process in one operation, in MiB."""
    kind, _comma, name = title.partition(", ")
    operation = Contenders(options, megabytes, 0, 1).operations()[kind][name]
    before, peak = measure_growth(operation)
    return (peak - before) / (1 << 20)


@contextmanager
def _empty_server(delay_ms: float, rate: float) -> Iterator[tuple[dict[str, str], Path]]:
    """Yields settings for clients, and a temporary directory."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(object_servers.running("seaweedfs", directory))
        options = dict(server.options)
        if delay_ms:
            port = int(options["endpoint_url"].rpartition(":")[2])
            slow = stack.enter_context(slow_network.running(port, delay_ms, rate))
            options["endpoint_url"] = f"http://127.0.0.1:{slow}"
        yield options, directory


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    times: list[Times] = []
    for number in range(given.rounds):
        with _empty_server(given.delay_ms, given.rate) as (options, directory):
            if given.ranks > 1:
                times.append(_on_ranks(options, given.megabytes, given.ranks, directory))
            else:
                times.append(_alternately(options, given.megabytes, 0, 1))
        print(f"round {number + 1}: {times[-1]}", file=sys.stderr, flush=True)
    growth: dict[str, float] = {}
    if given.ranks == 1:
        with _empty_server(given.delay_ms, given.rate) as (options, _directory):
            growth = {
                title: fresh_process.run(measure_peak, options, given.megabytes, title)
                for title in times[0]
            }
    print(f"torch {torch.__version__}, {platform.platform()}, {os.cpu_count()} cores")
    network = f"{given.delay_ms:g} ms, {given.rate:g} MB/s" if given.delay_ms else "loopback"
    print(
        f"SeaweedFS, {given.megabytes} MiB, {given.ranks} ranks, {given.rounds} rounds, {network}"
    )
    _print_times(times, growth)


def _print_times(times: list[Times], growth: dict[str, float]) -> None:
    print("| | seconds | CPU seconds | time / ours | CPU / ours | peak growth, MiB |")
    print("|---|---|---|---|---|---|")
    for title in times[0]:
        ours = f"{title.partition(', ')[0]}, torch_ckpt"
        seconds, cpu = (statistics.median(found[title][i] for found in times) for i in (0, 1))
        ratios = [
            statistics.median(found[title][i] / found[ours][i] for found in times) for i in (0, 1)
        ]
        peak = f"{growth[title]:.0f}" if growth else ""
        print(
            f"| {title} | {seconds:.2f} | {cpu:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {peak} |"
        )
