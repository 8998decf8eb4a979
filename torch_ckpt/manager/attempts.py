"""How the ranks of a run come to write a step together.

1. When they start they agree on an attempt, 8 hex digits that what they write has in its name
   (steps/local.py), and so on the root.
2. Before the first save rank 0 looks at the root for all: at the steps that are there, and at the
   metric that retention compares.
3. For each save every rank reads its state and makes a writer of the step.
4. One that cannot tells the others, which have begun and would wait for it.
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
from torch_ckpt.manager.run import Run
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
class Prepared:
    """What a save of a step needs.

    Attributes:
        values: of the state.
        bytes: of its tensors, each once for all ranks.
        writer: of the step.
    """

    values: dict[str, Any]
    bytes: int
    writer: FileSystemWriter


class Attempt:
    """What a run's ranks write beneath a root. All ranks make the same calls, in the same order.

    Args:
        name: that they have agreed on.
        run: theirs.
        lease: this rank's, on the root.
        deletions: that are waited for where there is no room.
        writer_options: passed to :class:`torch_ckpt.FileSystemWriter`.
    """

    def __init__(
        self,
        name: str,
        run: Run,
        lease: Lease,
        deletions: Deletions,
        writer_options: dict[str, Any],
    ) -> None:
        self._name = name
        self._run = run
        self._lease = lease
        self._deletions = deletions
        self._writer_options = writer_options

    def newest_step(self) -> int | None:
        """The newest complete step that rank 0 sees, the same on all ranks; None: there is none.

        Raises:
            TimeoutError, ConnectionError, RuntimeError: see
                :class:`torch_ckpt.ranks.calls.Call`.
        """

        def newest() -> int | None:
            complete = (info.step for info in self._run.store.entries(leftovers=False))
            return max(complete, default=None)

        return self._of_rank_0("CheckpointManager.save", newest)

    def lacks_metric(self, retention: Retention, metrics: dict[str, Any]) -> str | None:
        """As of :meth:`Retention.lacks_metric`, for a step that is to be saved.

        All ranks get the same answer, by rank 0's metrics.

        Raises:
            TypeError, ValueError: a metric is not a number.
            TimeoutError, ConnectionError, RuntimeError: as of :meth:`newest_step`.
        """

        def problem() -> str | None:
            others = (info.metrics for info in self._run.store.entries(leftovers=False))
            return retention.lacks_metric(numbers(metrics), others)

        return self._of_rank_0("CheckpointManager.save metrics", problem)

    def prepare(
        self,
        step: int,
        read: Callable[[], dict[str, Any]],
        metrics: dict[str, float],
        notes: dict[str, Any],
        *,
        overwrite: bool,
    ) -> Prepared:
        """Reads the state and makes the writer; the others learn of whatever this raises.

        Args:
            read: gives the state.
            metrics, notes: for the step's marker; the caller's own.
            overwrite: whether a complete step may be replaced.
        """

        def marked() -> dict[str, Any]:
            # The last thing before the step has its name.
            self._lease.require()
            return marker

        try:
            self._lease.require()
            marker = self._marker(metrics, notes)
            values = read()
            size = _whole_bytes(values)
            writer = self._run.store.writer(
                step,
                attempt=self._name,
                overwrite=overwrite,
                marker=marked,
                expected_bytes=size,
                # The other ranks wait for this one's plan.
                make_room=functools.partial(self._deletions.make_room, self._run.timeout / 2),
                **self._writer_options,
            )
        except BaseException as error:
            ranks = Meeting.of(self._run.process_group, no_dist=False).ranks(self._run.timeout)
            spawn(functools.partial(tell_the_others, ranks, error))
            if isinstance(error, CheckpointException):
                # What was read may have used dcp.
                raise of_torch(error) from None
            raise
        return Prepared(values, size, writer)

    def _of_rank_0(self, name: str, look: Callable[[], T | None]) -> T | None:
        """What rank 0 finds, on all ranks."""

        def of_rank_0(found: list[T | None]) -> T | Disagreement | None:
            return found[0]

        with Call(name, self._run.process_group, self._run.timeout) as call:
            return call.exchange(lambda: look() if call.rank == 0 else None, of_rank_0)

    def _marker(self, metrics: dict[str, float], notes: dict[str, Any]) -> dict[str, Any]:
        """A copy, since the caller may go on with theirs."""
        return parsed_marker(
            encoded_marker(
                {
                    "metrics": numbers(metrics),
                    "notes": _known_to_json(notes),
                    "ranks": self._run.ranks,
                    "torch_ckpt": __version__,
                }
            )
        )


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics as floats; tensors of one element are numbers, too.

    Raises:
        TypeError, ValueError: a metric is not a number, or a float cannot hold it; names it.
    """
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, metric: Any) -> float:
    try:
        return float(metric)
    except OverflowError:
        raise ValueError(
            f"metrics[{name!r}] is an integer that no float can hold: save math.inf in its place"
        ) from None
    except (TypeError, ValueError) as error:
        raise _naming(f"metrics[{name!r}] must be a number", error) from None


def _known_to_json(notes: dict[str, Any]) -> dict[str, Any]:
    for name, note in notes.items() if isinstance(notes, dict) else ():
        try:
            json.dumps({name: note}, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise _naming(f"notes[{name!r}] must be what JSON knows", error) from None
    return notes


def _naming(text: str, error: TypeError | ValueError) -> TypeError | ValueError:
    kind = ValueError if isinstance(error, ValueError) else TypeError
    return kind(f"{text}: {error}")


def agree_on_name(
    root: str,
    before: Callable[[], None],
    *,
    process_group: dist.ProcessGroup | None,
    timeout: float,
) -> str:
    """The attempt of all ranks; ``before`` is run on each, and where it raises all do.

    Raises:
        RanksDisagree: they have different roots.
        TimeoutError, ConnectionError, RuntimeError: see :class:`torch_ckpt.ranks.calls.Call`.
    """

    def mine() -> tuple[str, str]:
        # It may wait for as long as another run's lease takes to expire.
        begun = time.monotonic()
        with call.alive(lambda: int(min(time.monotonic() - begun, 2 * TIMES.expiry))):
            before()
        return root, new_name()

    def chosen(brought: list[tuple[str, str]]) -> str | Disagreement:
        if len({root for root, _name in brought}) > 1:
            return Disagreement(
                "ranks have different roots:",
                [f"rank {rank}: {root}" for rank, (root, _) in enumerate(brought)],
            )
        return brought[0][1]

    with Call("CheckpointManager", process_group, timeout) as call:
        return call.exchange(mine, chosen)


def new_name() -> str:
    """One that no other run has."""
    return uuid.uuid4().hex[:8]


def _whole_bytes(values: dict[str, Any]) -> int:
    tensors = pytree.tree_leaves(values)
    return sum(t.numel() * t.itemsize for t in tensors if isinstance(t, torch.Tensor))
