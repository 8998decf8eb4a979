"""Which step is restored: the same one on all ranks.

1. Rank 0 lists the complete steps, after its deletions. Those are tried, the newest first, or the
   one that was asked for.
2. Where only other ranks do not find a step, all try it again for a while.
3. Where a step is damaged, all ranks pass over it. If it was deleted after the listing, rank 0
   lists the steps again. Any other error ends the restore on all.
4. Rank 0 names what has a step's name and, for want of the marker, is none.
"""

from __future__ import annotations

import functools
import time
from collections.abc import MutableMapping
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt._base.formatting import some_of
from torch_ckpt._base.log import warn
from torch_ckpt._base.options import reusable_options
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.report import LoadReport
from torch_ckpt.manager.deletions import Deletions
from torch_ckpt.manager.run import Run
from torch_ckpt.ranks.calls import Call, Disagreement
from torch_ckpt.ranks.failures import causes, is_damage, is_elsewhere
from torch_ckpt.saving.events import Event
from torch_ckpt.state.app_state import AppState
from torch_ckpt.steps import MARKER_NAME, step_name

#: Between attempts to load a step that rank 0 sees and other ranks do not, in seconds: network file
#: systems remember for a minute what was not there.
_PATIENCE_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0)

_CALL = "CheckpointManager.restore"


class Restorer:
    """Restores a state from one of the steps. All ranks make the same calls, in the same order.

    Args:
        run: whose steps they are.
        deletions: that leave alone what is being read.
        load_options: passed to :func:`torch_ckpt.load`, once for each step that is tried.

    Attributes:
        skipped: damaged steps that the last restore has passed over.
        report: how the state and the step that was restored last compare; None before, and where
            the load was torch's own.
    """

    def __init__(self, run: Run, deletions: Deletions, load_options: dict[str, Any]) -> None:
        self._run = run
        self._deletions = deletions
        self._load_options = load_options
        self.skipped = 0
        self.report: LoadReport | None = None

    def restore(
        self, state: MutableMapping[str, Any], step: int | None, **load_options: Any
    ) -> int | None:
        """The step that the state is of now; None where there is none.

        Args and raises: see :meth:`torch_ckpt.CheckpointManager.restore`; ``load_options`` are
        passed to :func:`torch_ckpt.load`.
        """
        self.skipped, self.report = 0, None
        # Every step that is tried, and every attempt, reads them anew.
        load_options = reusable_options(load_options)
        candidates, unmarked = self._agree_on_candidates(step)
        if unmarked and self._run.rank == 0:
            # It names the line that calls the manager.
            warn(self._of_unmarked(unmarked), stacklevel=3)
        if not candidates:
            return None
        damages: list[str] = []
        tried: set[int] = set()
        deleted = 0
        while candidates:
            candidate = candidates.pop(0)
            tried.add(candidate)
            with self._deletions.reading(candidate):
                try:
                    report = self._load_patiently(candidate, state, load_options)
                except CheckpointException as error:
                    if step is not None or not is_damage(error) or is_elsewhere(error):
                        raise
                    damages.append(f"step {candidate}: {causes(error)}")
                    there, _unmarked = self._agree_on_candidates(None)
                    if candidate in there:
                        self._pass_over(candidate, damages[-1])
                    else:
                        # The run that saves here has deleted it, and has a newer one.
                        damages[-1] += "; it was deleted meanwhile"
                        deleted += 1
                        candidates = [other for other in there if other not in tried]
                    continue
            self.skipped, self.report = len(damages) - deleted, report
            return candidate
        raise CheckpointError(
            f"none of the steps in {self._run.store.root} can be loaded, so training does not "
            f"begin anew by itself: {'; '.join(damages)}"
        )

    def _pass_over(self, step: int, damage: str) -> None:
        self._run.report(Event("damaged", step, self._run.rank, message=f"{damage}; passed over"))
        if self._run.rank == 0:
            # It names the line that calls the manager.
            warn(f"{damage}; the one before is restored", stacklevel=4)

    def _of_unmarked(self, paths: list[str]) -> str:
        shown = some_of(paths)
        why = (
            "they are being saved, or were when their ranks died, or were put there without it; a "
            "sweep removes those that nobody has written to for an hour"
            if self._run.store.sweeps_what_lacks_markers
            else "they were saved or copied without it, and stay until training comes to their step"
        )
        return (
            f"not restored, since there is no {MARKER_NAME} in them: {shown}: {why}. An empty file "
            "of that name makes a step of one that is whole"
        )

    def _agree_on_candidates(self, step: int | None) -> tuple[list[int], list[str]]:
        """The steps to try, in this order, as rank 0 sees them; and what only lacks the marker."""

        def mine() -> tuple[int | None, tuple[list[int], list[str]]]:
            if self._run.rank != 0:
                return step, ([], [])
            # Or a step could go that is being chosen.
            with call.alive(time.monotonic_ns):
                self._deletions.settle()
            entries = self._run.store.entries()
            complete = [info.step for info in entries if info.complete]
            return step, (complete, [info.path for info in entries if info.lacks_marker])

        def of_rank_0(
            brought: list[tuple[int | None, tuple[list[int], list[str]]]],
        ) -> tuple[list[int], list[str]] | Disagreement:
            if len({wanted for wanted, _steps in brought}) > 1:
                return Disagreement(
                    "ranks ask for different steps:",
                    [f"rank {rank}: {wanted}" for rank, (wanted, _) in enumerate(brought)],
                )
            return brought[0][1]

        with Call(_CALL, self._run.process_group, self._run.timeout) as call:
            there, unmarked = call.exchange(mine, of_rank_0)
        if step is None:
            return there[::-1], unmarked
        if step in there:
            return [step], unmarked
        found = [path for path in unmarked if path.endswith(f"/{step_name(step)}")]
        what = f"has no {MARKER_NAME}" if found else "is not there"
        complete = f"complete steps are {there}" if there else "no step is complete"
        raise FileNotFoundError(2, f"step {step} {what}; {complete}", self._run.store.root)

    def _load_patiently(
        self, step: int, state: MutableMapping[str, Any], load_options: dict[str, Any]
    ) -> LoadReport | None:
        patience = iter(_PATIENCE_SECONDS)
        while True:
            try:
                return self._load(step, state, load_options)
            except CheckpointException as error:
                # All ranks have the same failures, and so wait alike.
                seconds = next(patience, None)
                if seconds is None or not is_elsewhere(error):
                    raise
                time.sleep(seconds)

    def _load(
        self, step: int, state: MutableMapping[str, Any], load_options: dict[str, Any]
    ) -> LoadReport | None:
        load = functools.partial(
            self._run.store.load,
            step,
            process_group=self._run.process_group,
            **({"timeout": self._run.timeout} | load_options | self._load_options),
        )
        return AppState(state).restore(
            load, call=_CALL, process_group=self._run.process_group, timeout=self._run.timeout
        )
