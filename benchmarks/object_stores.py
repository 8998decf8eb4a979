"""Saves to and loads from an S3 server, compared with obstore and with s3torchconnector.

``python -m benchmarks.object_stores [--megabytes 1024] [--rounds 9] [--delay-ms 20 --rate 100]
[--ranks 2]`` starts SeaweedFS on loopback. With ``--delay-ms``, all contenders go through a proxy
with a delay for each round trip and ``--rate`` megabytes a second for each connection.

- obstore: multipart puts of the same bytes, as four objects at once with four parts in flight, and
  ranges of 8 MiB in 8 threads that are copied to the tensors. Without checksums.
- s3torchconnector: its writer under ``dcp.save``, and its reader under ``dcp.load``, as they come.

The contenders take turns within a round, in the same processes. Each rank has its part of the
bytes. Seconds are those of the slowest rank, CPU seconds those of rank 0. The ratios are medians
over the rounds of the time of a contender divided by ours, so more than 1 means that torch_ckpt is
faster. Memory is the growth of the peak during one operation in a fresh process.

With one rank, also ``async_save`` to the URL and to a directory: the time until the call returns,
and the longest gap between two steps of a Python thread that only counts, during the upload and
during an upload by obstore of the same bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import torch_ckpt
from benchmarks import ranks, slow_network
from scripts import object_servers

_TENSORS, _OBJECTS = 32, 4
_PART, _RANGE = 16 << 20, 8 << 20

Operation = Callable[[], object]
#: Seconds and CPU seconds of each round, by operation and contender.
Times = dict[str, list[tuple[float, float]]]


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

    def async_save(self, path: str) -> torch_ckpt.AsyncSave:
        """Starts a save to the URL, or to a directory."""
        options = torch_ckpt.WriteOptions(storage_options=self.options)
        return torch_ckpt.async_save(self.state, path, options=options)

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


def _alternately(contenders: Contenders, rounds: int) -> Times:
    times: Times = {}
    for number in range(rounds + 1):
        for kind, operations in contenders.operations().items():
            for name, operation in operations.items():
                measured = _measured(operation)
                if number > 0:  # the first round warms up
                    times.setdefault(f"{kind}, {name}", []).append(measured)
    return times


def _on_rank(options: dict[str, str], megabytes: int, rounds: int, result: Path) -> None:
    contenders = Contenders(options, megabytes, dist.get_rank(), dist.get_world_size())
    times = _alternately(contenders, rounds)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(times))


def _longest_gap(operation: Operation) -> float:
    """Returns the longest time in seconds between two steps of a counting thread meanwhile."""
    is_done, longest = False, 0.0

    def count() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not is_done:
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    counter = threading.Thread(target=count)
    counter.start()
    try:
        operation()
    finally:
        is_done = True
        counter.join()
    return longest


def _background(contenders: Contenders, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Returns milliseconds of each round."""
    paths = {
        "async_save until the call returns, to the URL": f"s3://{contenders.bucket}/ours",
        "async_save until the call returns, to a directory": str(directory / "checkpoint"),
    }
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        measured = {}
        for title, path in paths.items():
            begun = time.perf_counter()
            running = contenders.async_save(path)
            measured[title] = time.perf_counter() - begun
            running.result()
        measured["longest gap, async_save to the URL"] = _longest_gap(
            lambda: contenders.async_save(f"s3://{contenders.bucket}/ours").result()
        )
        measured["longest gap, obstore's put"] = _longest_gap(contenders.put)
        for title, seconds in measured.items():
            if number > 0:
                found.setdefault(title, []).append(1e3 * seconds)
    return found


def _peak_growth(options: dict[str, str], megabytes: int, kind: str, name: str) -> float:
    """Measures one operation in a fresh process. Returns megabytes."""
    arguments = [json.dumps(options), str(megabytes), kind, name]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.object_stores", "--one", *arguments],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return float(run.stdout.split()[-1])


def _measure_one(options: str, megabytes: str, kind: str, name: str) -> None:
    contenders = Contenders(json.loads(options), int(megabytes), 0, 1)
    before = _peak()
    contenders.operations()[kind][name]()
    print((_peak() - before) / 1024)


def _peak() -> int:
    """Returns the peak memory of this process in KiB."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        _measure_one(*given.one)
        return
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(object_servers.running("seaweedfs", directory))
        options = dict(server.options)
        if given.delay_ms:
            port = int(options["endpoint_url"].rpartition(":")[2])
            slow = stack.enter_context(slow_network.running(port, given.delay_ms, given.rate))
            options["endpoint_url"] = f"http://127.0.0.1:{slow}"
        torch.set_num_threads(1)
        background: dict[str, list[float]] = {}
        if given.ranks > 1:
            result = directory / "times.json"
            work = partial(_on_rank, options, given.megabytes, given.rounds, result)
            ranks.run(given.ranks, work)
            times: Times = json.loads(result.read_text())
        else:
            contenders = Contenders(options, given.megabytes, 0, 1)
            times = _alternately(contenders, given.rounds)
            background = _background(contenders, given.rounds, directory)
        print(f"torch {torch.__version__}, {platform.platform()}, {os.cpu_count()} cores")
        network = f"{given.delay_ms:g} ms, {given.rate:g} MB/s" if given.delay_ms else "loopback"
        print(
            f"SeaweedFS, {given.megabytes} MiB, {given.ranks} ranks, {given.rounds} rounds, "
            f"{network}"
        )
        _print_times(times, options, given.megabytes if given.ranks == 1 else None)
        _print_background(background)


def _print_times(times: Times, options: dict[str, str], megabytes: int | None) -> None:
    """Prints the table. With a size, also measures memory."""
    print("| | seconds | CPU seconds | time / ours | CPU / ours | peak growth, MiB |")
    print("|---|---|---|---|---|---|")
    for title, rows in times.items():
        kind, _comma, name = title.partition(", ")
        ours = times[f"{kind}, torch_ckpt"]
        seconds, cpu = (statistics.median(row[i] for row in rows) for i in (0, 1))
        ratios = [
            statistics.median(a[i] / b[i] for a, b in zip(rows, ours, strict=True)) for i in (0, 1)
        ]
        growth = megabytes and f"{_peak_growth(options, megabytes, kind, name):.0f}"
        print(
            f"| {title} | {seconds:.2f} | {cpu:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} "
            f"| {growth or ''} |"
        )


def _print_background(found: dict[str, list[float]]) -> None:
    if found:
        print("| | milliseconds: median | least | most |")
        print("|---|---|---|---|")
    for title, rounds in found.items():
        print(
            f"| {title} | {statistics.median(rounds):.1f} | {min(rounds):.1f} | {max(rounds):.1f} |"
        )


if __name__ == "__main__":
    main()
