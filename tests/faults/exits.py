"""Ranks that end in some state of a save, a load or a watch; run by test_exits.py.

    python -m tests.faults.exits GROUP ROUNDS DIRECTORY [STATE...]

GROUP is "alone" (one rank, no process group), or two ranks whose process group is "kept" or
"destroyed". A rank ends as a program does after its last line: Python finalizes, then libraries'
destructors run. Ranks are forked, since importing torch takes longer than all else. When one ends,
its other threads hardly get the processor any more: what must not happen beside the interpreter's
end would happen then. A line is printed for each rank that did not end well.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torch_ckpt
from torch_ckpt import _C, multihost
from torch_ckpt.progress import Progress

GROUPS = {"alone": 1, "kept": 2, "destroyed": 2}

# That a rank may take to end, in seconds.
_LIMIT = 120

_SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""

# What a rank has until it ends.
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
    # Its thread asks the store all the time.
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
        torch_ckpt.load(_state(16), path, no_dist=True, progress=progress, thread_count=1)

    threading.Thread(target=load, daemon=True).start()
    begun.wait()


def while_a_daemon_is_in_the_engine(path: str) -> None:
    data, begun = bytes(1 << 24), threading.Event()

    def work() -> None:
        while True:
            _C.crc32(data)
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


def _be_rank(state: Callable[[str], None], path: str, group: str, rank: int, store: str) -> None:
    signal.alarm(_LIMIT)
    if group != "alone":
        port, prefix = store.split("/", 1)
        own = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", int(port), is_master=False))
        dist.init_process_group("gloo", store=own, rank=rank, world_size=GROUPS[group])
        # Who ends before the other has connected fails it. Not dist.barrier(), after which gloo's
        # own threads may take the GIL, and so end a process that keeps its group.
        own.set(f"{rank} is connected", "")
        own.wait([f"{other} is connected" for other in range(GROUPS[group])])
    state(path)
    if group == "destroyed":
        dist.destroy_process_group()
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != threading.get_native_id():
            with suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, int(thread), 19)


def _fork_busy() -> int:
    """A process that wants the processor which is all that this one and its children have."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    parent = os.getpid()
    busy = os.fork()
    if not busy:
        os.nice(10)
        while os.getppid() == parent:
            pass
        os._exit(0)
    return busy


def _outcome(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def main(group: str, rounds: int, directory: str, *states: str) -> None:
    busy = _fork_busy()
    server = None
    port = ""
    if group != "alone":
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        port = server.stdout.readline().decode().strip()
    for turn in range(rounds):
        for name in states or STATES:
            path = f"{directory}/{turn}-{name}"
            ranks = {}
            for rank in range(GROUPS[group]):
                pid = os.fork()
                if not pid:
                    _be_rank(STATES[name], path, group, rank, f"{port}/{path}")
                    return  # to the end of the program
                ranks[pid] = rank
            for pid, rank in ranks.items():
                _, status = os.waitpid(pid, 0)
                if status:
                    print(f"{name}, rank {rank}: {_outcome(status)}", flush=True)
            shutil.rmtree(path, ignore_errors=True)
    os.kill(busy, signal.SIGKILL)
    if server is not None:
        server.kill()


if __name__ == "__main__":
    faulthandler.enable()
    # Or each rank's end would collect all of torch's modules, for a second.
    gc.freeze()
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
