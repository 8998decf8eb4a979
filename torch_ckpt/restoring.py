"""Which step is restored: the same one on all ranks.

1. Rank 0 lists the complete steps, after its deletions. Those are tried, the newest first, or the
   one that was asked for.
2. Where only other ranks do not find a step, all try it again for a while.
3. Where a step is damaged, all ranks pass over it. Any other error ends the restore on all.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.app_state import AppState
from torch_ckpt.deletions import Deletions
from torch_ckpt.errors import CheckpointError
from torch_ckpt.events import Event
from torch_ckpt.failures import causes, is_damage, is_elsewhere
from torch_ckpt.loading import Names
from torch_ckpt.metrics import warn
from torch_ckpt.multihost.calls import Call, Disagreement
from torch_ckpt.steps import StepStore

#: Between attempts to load a step that rank 0 sees and other ranks do not, in seconds: network file
#: systems remember for a minute what was not there.
_PATIENCE_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0)

_CALL = "CheckpointManager.restore"


class Restorer:
    """Restores a state from one of the steps. All ranks make the same calls, in the same order.

    Args:
        store: where the steps are.
        deletions: that leave alone what is being read.
        rank: this process's.
        report: called with the event of each step that is passed over.
        process_group: None for the default group.
        timeout: seconds after which a rank that shows no sign of life is given up.
        load_options: passed to :func:`torch_ckpt.load`.
    """

    def __init__(
        self,
        store: StepStore,
        deletions: Deletions,
        rank: int,
        report: Callable[[Event], None],
        *,
        process_group: dist.ProcessGroup | None,
        timeout: float,
        load_options: dict[str, Any],
    ) -> None:
        self._store = store
        self._deletions = deletions
        self._rank = rank
        self._report = report
        self._group = process_group
        self._timeout = timeout
        self._load_options = load_options

    def restore(
        self, state: MutableMapping[str, Any], step: int | None, names: Names, strict: bool
    ) -> int | None:
        """The step that the state is of now; None where there is none.

        Args and raises: see :meth:`torch_ckpt.CheckpointManager.restore`.
        """
        candidates = self._agree_on_candidates(step)
        if not candidates:
            return None
        damages: list[str] = []
        for candidate in candidates:
            with self._deletions.reading(candidate):
                try:
                    self._load_patiently(candidate, state, names, strict)
                except CheckpointException as error:
                    if step is not None or not is_damage(error) or is_elsewhere(error):
                        raise
                    damages.append(f"step {candidate}: {causes(error)}")
                    self._pass_over(candidate, damages[-1])
                    continue
            return candidate
        raise CheckpointError(
            f"none of the steps in {self._store.root} can be loaded, so training does not begin "
            f"anew by itself: {'; '.join(damages)}"
        )

    def _pass_over(self, step: int, damage: str) -> None:
        self._report(Event("damaged", step, self._rank, message=f"{damage}; passed over"))
        if self._rank == 0:
            # It names the line that calls the manager.
            warn(f"{damage}; the one before is restored", stacklevel=4)

    def _agree_on_candidates(self, step: int | None) -> list[int]:
        """The steps to try, in this order, as rank 0 sees them."""

        def mine() -> tuple[int | None, list[int]]:
            if self._rank != 0:
                return step, []
            # Or a step could go that is being chosen.
            with call.alive(time.monotonic_ns):
                self._deletions.settle()
            return step, [info.step for info in self._store.entries(leftovers=False)]

        def of_rank_0(brought: list[tuple[int | None, list[int]]]) -> list[int] | Disagreement:
            if len({wanted for wanted, _steps in brought}) > 1:
                return Disagreement(
                    "ranks ask for different steps:",
                    [f"rank {rank}: {wanted}" for rank, (wanted, _) in enumerate(brought)],
                )
            return brought[0][1]

        with Call(_CALL, self._group, self._timeout) as call:
            there = call.exchange(mine, of_rank_0)
        if step is None:
            return there[::-1]
        if step not in there:
            raise FileNotFoundError(
                2, f"step {step} is not there; complete are {there or 'none'}", self._store.root
            )
        return [step]

    def _load_patiently(
        self, step: int, state: MutableMapping[str, Any], names: Names, strict: bool
    ) -> None:
        for seconds in (*_PATIENCE_SECONDS, None):
            try:
                self._load(step, state, names, strict)
                return
            except CheckpointException as error:
                # All ranks have the same failures, and so wait alike.
                if seconds is None or not is_elsewhere(error):
                    raise
                time.sleep(seconds)

    def _load(self, step: int, state: MutableMapping[str, Any], names: Names, strict: bool) -> None:
        load = functools.partial(
            self._store.load,
            step,
            process_group=self._group,
            names=names,
            strict=strict,
            **self._load_options,
        )
        AppState(state).restore(load, call=_CALL, process_group=self._group, timeout=self._timeout)
