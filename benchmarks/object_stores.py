"""Saves to and loads from an S3 server, compared with obstore and with s3torchconnector.

``python -m benchmarks.object_stores [--megabytes 1024] [--rounds 9] [--delay-ms 20 --rate 100]``
starts SeaweedFS on loopback. With ``--delay-ms``, all contenders go through a proxy with a delay
for each round trip and ``--rate`` megabytes a second for each connection.

- obstore: multipart puts of the same bytes, as four objects at once with four parts in flight, and
  ranges of 8 MiB in 8 threads that are copied to the tensors. Without checksums.
- s3torchconnector: its writer under ``dcp.save``, and its reader under ``dcp.load``, as they come.

The contenders take turns within a round, in one process. The ratios are medians over the rounds of
the time of a contender divided by ours, so more than 1 means that torch_ckpt is faster. Memory is
the growth of the peak during one operation in a fresh process.
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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import torch_ckpt
from benchmarks import slow_network
from scripts import object_servers

_TENSORS, _OBJECTS = 32, 4
_PART, _RANGE = 16 << 20, 8 << 20

Operation = Callable[[], object]


class Contenders:
    """The operations of all contenders on one state."""

    def __init__(self, options: dict[str, str], megabytes: int) -> None:
        self.options, self.bucket = options, object_servers.BUCKET
        elements = (megabytes << 20) // 4 // _TENSORS
        self.state = {f"weight {n}": torch.randn(elements) for n in range(_TENSORS)}
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
        torch_ckpt.save(self.state, f"s3://{self.bucket}/ours", options=options, no_dist=True)

    def load(self) -> None:
        options = torch_ckpt.ReadOptions(storage_options=self.options)
        torch_ckpt.load(self.target, f"s3://{self.bucket}/ours", options=options, no_dist=True)

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
                store, f"bare/{number}", pieces, use_multipart=True, chunk_size=_PART,
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
                    ranges.append((f"bare/{number}", at + begin, view[begin:end]))
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
        dcp_save(self.state, storage_writer=self._connector("writer"), no_dist=True)

    def load_by_connector(self) -> None:
        dcp_load(self.target, storage_reader=self._connector("reader"), no_dist=True)


def _measured(operation: Operation) -> tuple[float, float]:
    """Returns seconds and CPU seconds of this process."""
    begun, cpu = time.perf_counter(), time.process_time()
    operation()
    return time.perf_counter() - begun, time.process_time() - cpu


def _peak_growth(options: dict[str, str], megabytes: int, kind: str, name: str) -> float:
    """Measures one operation in a fresh process. Returns megabytes."""
    arguments = [json.dumps(options), str(megabytes), kind, name]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.object_stores", "--one", *arguments],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return float(run.stdout.split()[-1])


def _measure_one(options: str, megabytes: str, kind: str, name: str) -> None:
    contenders = Contenders(json.loads(options), int(megabytes))
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
        contenders = Contenders(options, given.megabytes)
        times: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for number in range(given.rounds + 1):
            for kind, operations in contenders.operations().items():
                for name, operation in operations.items():
                    measured = _measured(operation)
                    if number > 0:  # the first round warms up
                        times.setdefault((kind, name), []).append(measured)
        print(f"torch {torch.__version__}, {platform.platform()}, {os.cpu_count()} cores")
        network = f"{given.delay_ms:g} ms, {given.rate:g} MB/s" if given.delay_ms else "loopback"
        print(f"SeaweedFS, {given.megabytes} MiB, {given.rounds} rounds, {network}")
        print("| | seconds | CPU seconds | time / ours | CPU / ours | peak growth, MiB |")
        print("|---|---|---|---|---|---|")
        for (kind, name), rows in times.items():
            ours = times[kind, "torch_ckpt"]
            seconds, cpu = (statistics.median(row[i] for row in rows) for i in (0, 1))
            ratios = [
                statistics.median(a[i] / b[i] for a, b in zip(rows, ours, strict=True))
                for i in (0, 1)
            ]
            peak = _peak_growth(options, given.megabytes, kind, name)
            print(
                f"| {kind}, {name} | {seconds:.2f} | {cpu:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} "
                f"| {peak:.0f} |"
            )


if __name__ == "__main__":
    main()
