"""Ranks that end before their saves through the Megatron interface have ended; run by
test_megatron_ends.py.

torchrun ... -m tests.distributed.megatron_ends WAY DIRECTORY
"""

from __future__ import annotations

import sys
import time
from functools import partial

import torch
import torch.distributed as dist

from torch_ckpt.megatron import (
    AsyncCallsQueue,
    AsyncRequest,
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)


def without_a_process_group(path: str) -> None:
    """Destroys the process group between the plan and the end of a save."""
    queue = AsyncCallsQueue(timeout=60)
    rank = dist.get_rank()
    writer = FileSystemWriterAsync(path)
    finalizing, *_ = save_state_dict_async_plan({f"of {rank}": torch.full((9,), rank)}, writer)
    function, preload, arguments = writer.get_save_function_and_args()
    finalize = partial(save_state_dict_async_finalize, *finalizing)
    queue.schedule_async_request(AsyncRequest(function, arguments, [finalize], preload_fn=preload))
    dist.barrier()
    dist.destroy_process_group()
    queue.close()


def as_soon_as_it_is_closed(path: str) -> None:
    """Ends a rank before the others have been notified of the end of the last call."""
    queue = AsyncCallsQueue(timeout=60)
    seconds = 1.5 if dist.get_rank() == 0 else 0.0
    queue.schedule_async_request(AsyncRequest(time.sleep, (seconds,), []))
    queue.close()


def with_a_call_under_way(path: str) -> None:
    """Ends the ranks while they wait for the end of a call."""
    queue = AsyncCallsQueue(timeout=60)
    queue.schedule_async_request(AsyncRequest(time.sleep, (1.5,), []))
    queue.maybe_finalize_async_calls()


WAYS = {
    way.__name__: way
    for way in (without_a_process_group, as_soon_as_it_is_closed, with_a_call_under_way)
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    WAYS[sys.argv[1]](sys.argv[2])
