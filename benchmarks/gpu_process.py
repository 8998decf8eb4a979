"""Makes one measurement with tensors on a CUDA device, in its own process.

`python -m benchmarks.gpu_process WORK ...` prints one JSON object. WORK is "limits" (copies between
the device and the host, reads and writes of the disk), "io" (the I/O interfaces of the machine),
"loads", or the name of a saver. With `--device cpu` the same code runs without a device.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torch_ckpt
from torch_ckpt._base.system import mount_of

from . import limits, pagecache, states
from .background import Effort, Trace, trace_saves
from .contenders import DEVICE_SAVERS, LOADERS, Running, device_saver, our_background_saver
from .measure import Contender, settle
from .states import State, payload_bytes
from .training import Training, one_thread

SHAPES = ("few", "many")
LOADERS_MEASURED = ("ours_call", "stock")
_WARM_UP_STEPS = 10
_COPIES = 5
_WRITE_SHAPES = ("raw_direct_2x2", "raw_direct_1x4", "raw_buffered_2x1")
_READ_SHAPES = ("raw_direct_8x4", "raw_direct_16x1", "raw_buffered_2")


def build_state(shape: str, total_bytes: int, tensor_count: int, device: str) -> State:
    """Builds a training state of decoder shapes ("few"), or tensors of one size ("many")."""
    if shape == "few":
        return states.training_state(total_bytes, tensor_count, device=device)
    return states.small_tensors_state(tensor_count, total_bytes // tensor_count, device=device)


def synchronize(device: str) -> None:
    """Waits for the work of a CUDA device; does nothing for "cpu"."""
    if device != "cpu":
        torch.cuda.synchronize()


# --- limits --------------------------------------------------------------------------------------


def measure_limits(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the bytes per second of single large copies and of the disk; the best of a few."""
    on_device = torch.empty(options.size, dtype=torch.uint8, device=options.device)
    on_device.random_()
    found: dict[str, Any] = {}
    for kind in ("pinned", "pageable"):
        pinned = kind == "pinned" and options.device != "cpu"
        on_host = torch.zeros(options.size, dtype=torch.uint8, pin_memory=pinned)
        for way, source, target in (
            ("to_host", on_device, on_host),
            ("to_device", on_host, on_device),
        ):
            copy = partial(_copy, source, target, options.device)
            found[f"{kind}_{way}"] = _best_rate(copy, options.size, _COPIES)
        del on_host
    return found | _disk_limits(options)


def _copy(source: torch.Tensor, target: torch.Tensor, device: str) -> None:
    target.copy_(source, non_blocking=True)
    synchronize(device)


def _best_rate(work: Callable[[], object], moved: int, attempts: int) -> float:
    seconds = []
    for _ in range(attempts):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return moved / min(seconds)


def _disk_limits(options: argparse.Namespace) -> dict[str, Any]:
    target: Path = options.dir / "raw"
    direct = limits.direct_io_works(options.dir)
    writer = limits.RawWriter()
    found: dict[str, Any] = {"disk_write": 0.0, "disk_read": 0.0}
    for name in _WRITE_SHAPES:
        shape = limits.WRITE_SHAPES[name]
        if shape.direct and not direct:
            continue
        shutil.rmtree(target, ignore_errors=True)
        settle()
        rate = _best_rate(partial(writer.write, target, options.size, shape), options.size, 1)
        if rate > found["disk_write"]:
            found |= {"disk_write": rate, "disk_write_shape": shape.label}
    files = sorted(target.iterdir())
    for name in _READ_SHAPES:
        read_shape = limits.READ_SHAPES[name]
        if read_shape.direct and not direct:
            continue
        try:
            pagecache.evict(files)
        except pagecache.CacheStateError as error:
            # tmpfs consists of page cache only.
            found["disk_read_error"] = str(error)
            break
        rate = _best_rate(partial(limits.RawReader(read_shape).read, files), options.size, 1)
        if rate > found["disk_read"]:
            found |= {"disk_read": rate, "disk_read_shape": read_shape.label}
    shutil.rmtree(target)
    return found


# --- what the machine has ------------------------------------------------------------------------


class _CuFileError(ctypes.Structure):
    _fields_ = (("error", ctypes.c_int), ("cuda_error", ctypes.c_int))


def describe_io(options: argparse.Namespace) -> dict[str, Any]:
    """Reports whether io_uring, direct I/O and cuFile work, and the kernel's settings for them."""
    return {
        "io_uring": _io_uring(),
        "io_uring_disabled": _contents("/proc/sys/kernel/io_uring_disabled"),
        "direct_io": limits.direct_io_works(options.dir),
        "file_system": mount_of(options.dir).file_system,
        "cufile": _cufile(options.device),
        "nvidia_fs": Path("/proc/driver/nvidia-fs").exists(),
        "memory_available_bytes": _memory_available(),
        "dev_shm_free_bytes": _free_bytes(Path("/dev/shm")),
        "dir_free_bytes": _free_bytes(options.dir),
    }


def _contents(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _free_bytes(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _memory_available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("MemAvailable:")]
    return int(line.split()[1]) << 10


def _io_uring() -> str:
    """Returns "works", or the error of io_uring_setup(2)."""
    setup_number, parameter_bytes = 425, 120
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(parameter_bytes)
    descriptor = libc.syscall(setup_number, 1, parameters)
    if descriptor < 0:
        return os.strerror(ctypes.get_errno())
    os.close(descriptor)
    return "works"


def _cufile(device: str) -> str:
    """Returns "opens", or the reason why cuFile's driver cannot be opened."""
    folders = [Path(entry) / "nvidia" for entry in sys.path if entry]
    found = [path for folder in folders for path in folder.glob("*/lib/libcufile.so.0")]
    for name in ("libcufile.so.0", *map(str, found)):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if device == "cpu":
            return "there is a library, and no device"
        torch.zeros(1, device=device)
        library.cuFileDriverOpen.restype = _CuFileError
        status = library.cuFileDriverOpen()
        return "opens" if status.error == 0 else f"error {status.error}"
    return "there is no library"


# --- saves ---------------------------------------------------------------------------------------


def measure_saves(options: argparse.Namespace) -> dict[str, Any]:
    """Traces the first save of the process and later saves, and the device memory of a save.

    A checkpoint of our savers must load bit for bit.
    """
    state = build_state(options.shape, options.size, options.tensors, options.device)
    total = payload_bytes(state)
    target: Path = options.dir / "measured"
    training = Training(device=options.device)

    def step() -> None:
        training.step()
        synchronize(options.device)

    with device_saver(options.work) as saver, one_thread():
        if options.max_host_bytes is not None and options.work.startswith("ours_"):
            is_blocking = options.work == "ours_blocking"
            saver = our_background_saver(
                "blocking" if is_blocking else "overlapped", options.max_host_bytes
            )
        for _ in range(_WARM_UP_STEPS):
            step()
        contender = Contender(
            name=options.work,
            label=saver.label,
            kind=saver.kind,
            run=lambda: saver.start(state, target),
            prepare=partial(shutil.rmtree, target, ignore_errors=True),
            target=target,
        )
        traces: list[Trace] = []
        # The duration of idle steps drifts, so measure them before each save.
        for _ in range(options.saves):
            traces += trace_saves(contender, step, Effort(options.idle_steps, least_steps=0))
        used = _device_memory(contender, options.device)
    if saver.kind == "ours":
        _require_saved(state, target)
    shutil.rmtree(target)
    return {
        "label": saver.label,
        "kind": saver.kind,
        "bytes": total,
        "saves": [asdict(trace) for trace in traces],
        "device_memory_bytes": used,
    }


def _device_memory(contender: Contender, device: str) -> int | None:
    """Saves once; returns the bytes of device memory that the save added, None for "cpu"."""
    contender.prepare()
    synchronize(device)
    before = 0
    if device != "cpu":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    running = contender.run()
    assert isinstance(running, Running)
    running.committed.result()
    return None if device == "cpu" else torch.cuda.max_memory_allocated() - before


def _require_saved(state: State, path: Path) -> None:
    found = states.blank_copy(state)
    torch_ckpt.load(found, path)
    differing = states.first_difference(state, found)
    if differing is not None:
        raise AssertionError(f"{path}: {differing} is not what was saved")


# --- loads ---------------------------------------------------------------------------------------


def measure_loads(options: argparse.Namespace) -> dict[str, Any]:
    """Times loads to the device, from the page cache and from the disk."""
    state = build_state(options.shape, options.size, options.tensors, options.device)
    path: Path = options.dir / "loaded"
    torch_ckpt.save(state, path)
    files = sorted(path.glob("*.distcp"))
    targets = states.blank_copy(state)
    samples: list[dict[str, Any]] = []
    skipped: list[str] = []
    for cache, prepare in (("warm", pagecache.warm), ("cold", pagecache.evict)):
        for number in range(options.saves):
            for name in LOADERS_MEASURED:
                states.wipe(targets)
                try:
                    prepare(files)
                except pagecache.CacheStateError as error:
                    skipped.append(f"{cache}: {error}")
                    continue
                synchronize(options.device)
                began = time.perf_counter()
                LOADERS[name].load(targets, path)
                synchronize(options.device)
                seconds = time.perf_counter() - began
                samples.append(
                    {"contender": name, "cache": cache, "round": number, "wall_s": seconds}
                )
                differing = states.first_difference(state, targets)
                if differing is not None:
                    raise AssertionError(f"{name}: {differing} is not what was saved")
    shutil.rmtree(path)
    return {"bytes": payload_bytes(state), "samples": samples, "skipped": skipped}


def measure(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the measurement that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", choices=("limits", "io", "loads", *DEVICE_SAVERS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="few")
    parser.add_argument("--size", type=int, default=0, help="bytes")
    parser.add_argument("--tensors", type=int, default=0)
    parser.add_argument("--dir", type=Path, required=True, help="an existing directory")
    parser.add_argument("--saves", type=int, default=3, help="saves, or loads of each kind")
    parser.add_argument("--idle-steps", type=int, default=30, help="timed before each save")
    parser.add_argument("--max-host-bytes", type=int, help="for our savers")
    options = parser.parse_args(arguments)
    if options.work == "limits":
        return measure_limits(options)
    if options.work == "io":
        return describe_io(options)
    if options.work == "loads":
        return measure_loads(options)
    return measure_saves(options)


if __name__ == "__main__":
    print(json.dumps(measure()))
