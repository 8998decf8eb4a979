"""Lets rank 0 decide for all ranks what starts at a step.

1. Steps are grouped into blocks of about half a second. There is one decision for each block, which
   is for the first step of the block. Nothing starts at the other steps.
2. At the first step of a block, rank 0 decides. It writes that step, the length of the block and
   the decision to the process group's store.
3. The other ranks read the decision from the store at the first step of the block. A rank that is
   ahead of rank 0 waits for the decision. Within a block, no rank accesses the store.
4. If a rank's step differs from the step in the decision, the rank raises an error, because the
   ranks would act at different steps.
5. At every 16th decision, a rank that has read it adds 1 to a counter. By the counter, rank 0 knows
   a number of decisions that all ranks have read, and deletes these.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks.failures import failed_on, heartbeat_failures
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.ranks.store import peek

T = TypeVar("T")

_BLOCK_SECONDS = 0.5

# Number of decisions between two changes of the counter.
_COUNTED = 16

_COUNTER = "read"


class StepAgreement:
    """Rank 0's decisions, in the order in which every rank reads them.

    All ranks must call :meth:`next` with the same steps, from one thread.

    Args:
        name: name of the decisions, for errors.
        group: the ranks; used by this object only.
        timeout: seconds to wait for rank 0's decision.
        clock: returns seconds.

    Attributes:
        count: number of decisions so far.

    Example::

        agreement = StepAgreement("save decision", group, timeout=300)
        if agreement.next(step, lambda: "save" if is_time_to_save() else "") == "save":
            save(step)
    """

    def __init__(
        self,
        name: str,
        group: RankGroup,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = 0
        self._name = name
        self._group = group
        self._timeout = timeout
        self._clock = clock
        self._block = range(0)
        self._last: tuple[int, float] | None = None
        self._deleted = 0  # number of decisions that rank 0 has deleted

    def next(self, step: int, decide: Callable[[], str], *, ends_block: bool = False) -> str:
        """Returns the decision for a step; "" for every step of a block except the first.

        Args:
            decide: returns the decision; called on rank 0 only.
            ends_block: the step gets a decision for itself, and the next step begins a block. All
                ranks must pass the same value.

        Raises:
            CheckpointError: rank 0 is at another step.
            CheckpointException: the store is lost, or rank 0 has not decided within the timeout.
        """
        # If training was rewound, the step is before the block and begins a new one.
        if step in self._block and not ends_block:
            return ""
        if self._group.rank == 0:
            decision = decide()
            length = 1 if ends_block else self._block_length(step)
            if self._group.distributed:
                self._request(self._publish, f"{step}:{length}:{decision}")
        else:
            step_of_rank_0, length, decision = self._read()
            if step_of_rank_0 != step:
                raise CheckpointError(
                    f"rank {self._group.rank} is at step {step}, but rank 0 is at step "
                    f"{step_of_rank_0}: all ranks must call save() with the same steps"
                )
        self.count += 1
        self._block = range(step, step + length)
        return decision

    # --- private ---------------------------------------------------------------------------------

    def _block_length(self, step: int) -> int:
        now = self._clock()
        last, self._last = self._last, (step, now)
        if last is None or step <= last[0]:
            return 1
        per_step = max(1e-9, (now - last[1]) / (step - last[0]))
        # Cap the block at twice the number of steps since the last decision, because those steps
        # may have been unusually fast.
        return max(1, min(int(_BLOCK_SECONDS / per_step), 2 * (step - last[0])))

    def _publish(self, text: str) -> None:
        store = self._group.keys("")
        store.set(str(self.count), text)
        counted = self.count // _COUNTED
        if counted and self.count % _COUNTED == 0:
            # Each of the other ranks has counted at most `counted` times. If all but one have done
            # so, this is how often that one has.
            readers = self._group.size - 1
            least = store.add(_COUNTER, 0) - (readers - 1) * counted
            for number in range(self._deleted, least * _COUNTED):
                store.delete_key(str(number))
            self._deleted = max(self._deleted, least * _COUNTED)

    def _read(self) -> tuple[int, int, str]:
        key, store = str(self.count), self._group.keys("")

        def read() -> bytes | None:
            data = peek(store, key)
            if data is not None and (self.count + 1) % _COUNTED == 0:
                store.add(_COUNTER, 1)
            return data

        started = time.monotonic()
        # Poll: a blocking wait would occupy the connection, which the running save needs, too.
        while (data := self._request(read)) is None:
            waited = time.monotonic() - started
            if waited >= self._timeout:
                raise failed_on(self._name, heartbeat_failures(self._name, [0], self._timeout))
            time.sleep(min(0.01, max(0.0002, waited / 10)))
        step, length, decision = data.decode().split(":", 2)
        return int(step), int(length), decision

    def _request(self, work: Callable[..., T], *args: object) -> T:
        return self._group.store_thread.request(
            self._name, self._group.rank, self._timeout, work, *args
        )
