"""Prepares saves: the agreement between ranks, and the work of each rank before a save.

1. When a manager is created, the ranks check that they have the same root and agree on an attempt:
   8 hex digits, unique to this run, in the names of unfinished steps (steps/local.py).
2. Before the first save, rank 0 lists the root. It sends all ranks the newest step, and whether any
   step has the metric that retention compares.
3. For each save, every rank reads its state and creates a writer for the step.
4. If this fails, the rank reports the error to the other ranks, which would otherwise wait for it.
"""

from __future__ import annotations

import functools
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils import _pytree as pytree

from torch_ckpt._base.version import __version__
from torch_ckpt.manager.deletions import Deletions
from torch_ckpt.manager.retention import Retention
from torch_ckpt.manager.run_context import RunContext
from torch_ckpt.ranks.calls import Call, Disagreement
from torch_ckpt.ranks.failures import of_torch
from torch_ckpt.ranks.meeting import Meeting
from torch_ckpt.saving.running_saves import spawn
from torch_ckpt.saving.session import tell_the_others
from torch_ckpt.saving.writer import FileSystemWriter
from torch_ckpt.steps import encoded_marker, parsed_marker
from torch_ckpt.steps.lease import TIMES, Lease

T = TypeVar("T")


@dataclass(frozen=True)
class PreparedSave:
    """The inputs of one save.

    Attributes:
        values: values of the state.
        bytes: total size of the tensors. A DTensor counts in full, not only with this rank's shard.
        writer: writer of the step.
    """

    values: dict[str, Any]
    bytes: int
    writer: FileSystemWriter


class SavePreparer:
    """Prepares the saves of a run. All ranks make the same calls in the same order.

    Args:
        attempt: the 8 hex digits that the ranks have agreed on.
        run: the manager's run.
        lease: this rank's lease on the root.
        deletions: the manager's deletions, which make room if the disk is full.
        writer_options: passed to :class:`torch_ckpt.FileSystemWriter`.
    """

    def __init__(
        self,
        attempt: str,
        run: RunContext,
        lease: Lease,
        deletions: Deletions,
        writer_options: dict[str, Any],
    ) -> None:
        self._attempt = attempt
        self._run = run
        self._lease = lease
        self._deletions = deletions
        self._writer_options = writer_options

    def newest_step(self) -> int | None:
        """Returns, on all ranks, the newest complete step that rank 0 sees; None if there is none.

        Raises:
            TimeoutError, ConnectionError, RuntimeError: see
                :class:`torch_ckpt.ranks.calls.Call`.
        """

        def newest() -> int | None:
            complete = (info.step for info in self._run.store.entries(leftovers=False))
            return max(complete, default=None)

        return self._run_on_rank_0("CheckpointManager.save", newest)

    def lacks_metric(self, retention: Retention, metrics: dict[str, Any]) -> str | None:
        """Calls :meth:`Retention.lacks_metric` for a step that is about to be saved.

        Checks rank 0's metrics, and returns the same answer on all ranks.

        Raises:
            TypeError, ValueError: a metric is not a number.
            TimeoutError, ConnectionError, RuntimeError: see :meth:`newest_step`.
        """

        def problem() -> str | None:
            others = (info.metrics for info in self._run.store.entries(leftovers=False))
            return retention.lacks_metric(numbers(metrics), others)

        return self._run_on_rank_0("CheckpointManager.save metrics", problem)

    def prepare(
        self,
        step: int,
        read: Callable[[], dict[str, Any]],
        metrics: dict[str, float],
        notes: dict[str, Any],
        *,
        overwrite: bool,
    ) -> PreparedSave:
        """Reads the state and creates the writer. Reports any exception to the other ranks.

        Args:
            read: returns the state.
            metrics, notes: for the step's marker.
            overwrite: True if a complete step may be replaced.
        """

        def marker_if_leased() -> dict[str, Any]:
            # Called right before the rename that completes the step.
            self._lease.require()
            return marker

        try:
            self._lease.require()
            marker = self._marker(metrics, notes)
            values = read()
            size = _full_bytes(values)
            writer = self._run.store.writer(
                step,
                attempt=self._attempt,
                overwrite=overwrite,
                marker=marker_if_leased,
                expected_bytes=size,
                # Stop waiting before the other ranks time out, because they need this rank's plan.
                make_room=functools.partial(self._deletions.make_room, self._run.timeout / 2),
                **self._writer_options,
            )
        except BaseException as error:
            ranks = Meeting.of(self._run.process_group, no_dist=False).ranks(self._run.timeout)
            spawn(functools.partial(tell_the_others, ranks, error))
            if isinstance(error, CheckpointException):
                # The exception may come from dcp functions called by a value's state_dict().
                raise of_torch(error) from None
            raise
        return PreparedSave(values, size, writer)

    def _run_on_rank_0(self, name: str, function: Callable[[], T | None]) -> T | None:
        """Calls a function on rank 0 and returns its result on all ranks."""

        def result_of_rank_0(results: list[T | None]) -> T | Disagreement | None:
            return results[0]

        with Call(name, self._run.process_group, self._run.timeout) as call:
            return call.exchange(lambda: function() if call.rank == 0 else None, result_of_rank_0)

    def _marker(self, metrics: dict[str, float], notes: dict[str, Any]) -> dict[str, Any]:
        """Returns the marker's content as a copy, because the caller may change its dicts."""
        return parsed_marker(
            encoded_marker(
                {
                    "metrics": numbers(metrics),
                    "notes": _require_json(notes),
                    "ranks": self._run.ranks,
                    "torch_ckpt": __version__,
                }
            )
        )


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Returns the metrics as floats. One-element tensors count as numbers.

    Raises:
        TypeError, ValueError: a metric is not a number or is too large for a float; the message
            names the metric.
    """
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, metric: Any) -> float:
    try:
        return float(metric)
    except OverflowError:
        raise ValueError(
            f"metrics[{name!r}] is an integer too large for a float. Pass math.inf instead."
        ) from None
    except (TypeError, ValueError) as error:
        raise _with_context(f"metrics[{name!r}] must be a number", error) from None


def _require_json(notes: dict[str, Any]) -> dict[str, Any]:
    for name, note in notes.items() if isinstance(notes, dict) else ():
        try:
            json.dumps({name: note}, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise _with_context(f"notes[{name!r}] must be a JSON value", error) from None
    return notes


def _with_context(text: str, error: TypeError | ValueError) -> TypeError | ValueError:
    kind = ValueError if isinstance(error, ValueError) else TypeError
    return kind(f"{text}: {error}")


def agree_on_attempt(
    root: str,
    before: Callable[[], None],
    *,
    process_group: dist.ProcessGroup | None,
    timeout: float,
) -> str:
    """Chooses one attempt for all ranks.

    Args:
        before: called first, on each rank. If it raises an exception on one rank, all ranks raise.

    Raises:
        RanksDisagree: ranks have different roots.
        TimeoutError, ConnectionError, RuntimeError: see :class:`torch_ckpt.ranks.calls.Call`.
    """

    def propose() -> tuple[str, str]:
        # before() may have to wait until another run's lease expires.
        started = time.monotonic()
        with call.alive(lambda: int(min(time.monotonic() - started, 2 * TIMES.expiry))):
            before()
        return root, new_attempt()

    def choose(proposals: list[tuple[str, str]]) -> str | Disagreement:
        if len({root for root, _attempt in proposals}) > 1:
            return Disagreement(
                "ranks have different roots:",
                [f"rank {rank}: {root}" for rank, (root, _) in enumerate(proposals)],
            )
        return proposals[0][1]

    with Call("CheckpointManager", process_group, timeout) as call:
        return call.exchange(propose, choose)


def new_attempt() -> str:
    """Returns 8 random hex digits, which identify this run."""
    return uuid.uuid4().hex[:8]


def _full_bytes(values: dict[str, Any]) -> int:
    tensors = pytree.tree_leaves(values)
    return sum(t.numel() * t.itemsize for t in tensors if isinstance(t, torch.Tensor))
