"""Saves in child processes, in addition to the saves in ../sweeps.py."""

from __future__ import annotations

import os
import resource
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.sweeps import SAVES, save_alone, state_of
from torch_ckpt.manager import run_context

#: The random part of the names that a manager writes.
ATTEMPT = "0123abcd"


def save_with_descriptors(path: str, seed: int, threads: int, spare: int) -> None:
    """Saves in a process that may open only ``spare`` more descriptors."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    while (last := os.open(os.devnull, os.O_RDONLY)) < highest:
        pass  # fills the gaps below
    os.close(last)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + spare, hard))
    save_alone(path, seed, threads)


def save_below(path: str, seed: int, threads: int, how: str) -> None:
    """Saves to a relative path; ``how`` is as in ``tests.sweeps.SAVES``."""
    directory, name = os.path.split(path)
    os.chdir(directory)
    SAVES[how](name, seed, threads)


def save_as_rank(path: str, seed: int, threads: int, how: str, rank: int, store: str) -> None:
    """Saves as one of two ranks with the same tensors, of which each rank writes some.

    Args:
        how: as in ``tests.sweeps.SAVES``.
        rank: 0 or 1; -1 is a single rank, for a first save that imports all modules.
        store: file of the ranks' store.
    """
    size = 1 if rank < 0 else 2
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=max(rank, 0), world_size=size
    )
    if how == "torch_ckpt.save":
        torch_ckpt.save(state_of(seed), path, options=torch_ckpt.WriteOptions(thread_count=threads))
    elif how == "dcp.save":
        writer = torch_ckpt.FileSystemWriter(path, thread_count=threads)
        dcp.save(state_of(seed), storage_writer=writer)
    else:
        torch_ckpt.async_save(
            state_of(seed), path, options=torch_ckpt.WriteOptions(thread_count=threads)
        ).result()


def save_below_as_rank(path: str, *arguments: Any) -> None:
    """Saves to a relative path; the other arguments: see :func:`save_as_rank`."""
    directory, name = os.path.split(path)
    os.chdir(directory)
    save_as_rank(name, *arguments)


def replace_step(root: str, seed: int) -> None:
    """Saves step 2 with a manager that keeps one step. Replaces step 2 if it exists."""
    run_context.new_attempt = lambda: ATTEMPT
    with torch_ckpt.CheckpointManager(root, keep=1, preemption=None) as manager:
        manager.save(2, state_of(seed), overwrite=True)
        manager.wait_until_finished()
