"""Ranks that exit in various states of a save, a load or a watch; run by test_exits.py.

A rank exits like a program after its last line: Python finalizes, and then the destructors of
libraries run. The other threads of the rank hardly get the processor then, so that
they still run during finalization, and harm that they do there shows.
"""

from __future__ import annotations

import gc
import os
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torch_ckpt
from torch_ckpt import _core, multihost
from torch_ckpt._base.progress import Progress

#: Number of ranks: without a process group, with one that exists at the exit, and with one that was
#: destroyed.
GROUPS = {"alone": 1, "kept": 2, "destroyed": 2}

# Objects that a rank references until it exits.
_kept: list[Any] = []


def _state(megabytes: int = 1) -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.full((1 << 18,), float(number)) for number in range(megabytes)}


# --- states --------------------------------------------------------------------------------------


def after_a_save(path: str) -> None:
    torch_ckpt.save(_state(), path)


def after_a_background_save(path: str) -> None:
    torch_ckpt.async_save(_state(), path).result()


def during_a_background_save(path: str) -> None:
    _kept.append(torch_ckpt.async_save(_state(16), path))


def during_a_background_save_whose_handle_was_dropped(path: str) -> None:
    torch_ckpt.async_save(_state(16), path)


def after_a_background_save_that_failed(path: str) -> None:
    Path(path).touch()
    torch_ckpt.async_save(_state(), path)


def after_a_manager(path: str) -> None:
    with torch_ckpt.CheckpointManager(path) as manager:
        manager.save(1, _state())


def during_a_managers_save(path: str) -> None:
    _kept.append(torch_ckpt.CheckpointManager(path))
    _kept[0].save(1, _state(16))


def while_notices_are_waited_for(path: str) -> None:
    # Its thread polls the store all the time.
    _kept.append(multihost.watch_for_preemption(poll_seconds=1e-5))
    assert not multihost.reached_preemption_sync_point(0)


def while_memory_is_reserved(path: str) -> None:
    torch_ckpt.reserve_pool(32 << 20, wait=False)


def while_a_daemon_loads(path: str) -> None:
    torch_ckpt.save(_state(16), path, no_dist=True)
    begun = threading.Event()

    def progress(_: Progress) -> None:
        begun.set()

    def load() -> None:
        torch_ckpt.load(
            _state(16),
            path,
            no_dist=True,
            options=torch_ckpt.ReadOptions(progress=progress, thread_count=1),
        )

    threading.Thread(target=load, daemon=True).start()
    begun.wait()


def while_a_daemon_is_in_the_engine(path: str) -> None:
    data, begun = bytes(1 << 24), threading.Event()

    def work() -> None:
        while True:
            _core.crc32(data)
            begun.set()

    threading.Thread(target=work, daemon=True).start()
    begun.wait()


STATES = {
    state.__name__: state
    for state in (
        after_a_save,
        after_a_background_save,
        during_a_background_save,
        during_a_background_save_whose_handle_was_dropped,
        after_a_background_save_that_failed,
        after_a_manager,
        during_a_managers_save,
        while_notices_are_waited_for,
        while_memory_is_reserved,
        while_a_daemon_loads,
        while_a_daemon_is_in_the_engine,
    )
}


# --- ranks ---------------------------------------------------------------------------------------


def be_rank(_: Connection, state: str, path: str, group: str) -> None:
    gc.freeze()  # otherwise the exit would collect all modules of torch
    _use_one_processor()
    if group != "alone":
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        own = dist.distributed_c10d._get_default_store()
        # A rank that exits before the other has connected would fail it. Do not use dist.barrier():
        # gloo's threads may take the GIL after it, which kills a process that keeps its group.
        own.set(f"{rank} is connected", "")
        own.wait([f"{other} is connected" for other in range(size)])
    STATES[state](path)
    if group == "destroyed":
        dist.destroy_process_group()
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != threading.get_native_id():
            with suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, int(thread), 19)


def be_busy(connection: Connection) -> None:
    """Keeps the ranks' processor busy."""
    _use_one_processor()
    os.nice(10)
    while not connection.poll():
        pass


def _use_one_processor() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
