"""Chooses the step to restore, which is the same on all ranks.

1. Rank 0 waits for its deletions and lists the complete steps. With a local tier, every rank also
   lists the steps on the disk of its host, and serves them to the other ranks until the restore
   ends (steps/tier.py). All ranks try these steps, or only
   the requested step: first those of the highest epoch and of the runs before it, newest first,
   then those of abandoned lineages (checkpoint/lineage.py). Rank 0 warns if there are any.
2. If rank 0 sees a step that other ranks do not see, all ranks retry for up to 90 seconds.
3. If a step is damaged, all ranks skip it. If it was deleted after the listing, rank 0 lists the
   steps again. Any other error ends the restore on all ranks.
4. Rank 0 warns about directories that have a step's name but no marker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt._base.checks import reusable
from torch_ckpt._base.formatting import some_of
from torch_ckpt._base.log import warn
from torch_ckpt.checkpoint.lineage import by_lineage, describe_mixture
from torch_ckpt.checkpoint.opened import Checkpoint
from torch_ckpt.errors import CheckpointError
from torch_ckpt.events import Event
from torch_ckpt.loading.load import LoadArguments
from torch_ckpt.loading.report import LoadReport
from torch_ckpt.manager.deletions import Deletions
from torch_ckpt.manager.local_tier import Tier
from torch_ckpt.manager.run_context import RunContext
from torch_ckpt.options import ReadOptions
from torch_ckpt.ranks.collective_call import CollectiveCall, Disagreement
from torch_ckpt.ranks.failures import causes, is_damage, is_elsewhere, may_be_damage
from torch_ckpt.state.states import require_state
from torch_ckpt.steps import MARKER_NAME, StepInfo, step_name
from torch_ckpt.steps.local_copy import LocalCopy, saves_on_disks
from torch_ckpt.steps.tier import Choice, TieredSteps, choose

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since Python 3.11

#: Seconds between attempts to load a step that rank 0 sees and other ranks do not. Network file
#: systems may cache the absence of a file for a minute.
_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0)

_CALL = "CheckpointManager.restore"

State = dict[str, Any]


class _Candidates(NamedTuple):
    """The steps that rank 0 proposes to restore.

    Attributes:
        steps: the steps to try, in order.
        unmarked: the paths of the directories that lack only the marker.
        leftovers: the paths of the other incomplete steps.
        mixture: describes the runs whose steps are mixed; empty if there are none.
        choices: the copies on the hosts' own disks, by step.
        addresses: where the ranks serve their copies.
    """

    steps: list[int]
    unmarked: list[str]
    leftovers: list[str]
    mixture: str
    choices: dict[int, Choice]
    addresses: list[bytes]


class _Listing(NamedTuple):
    """The steps that one rank sees.

    Attributes:
        wanted: the step that its caller requests.
        entries: the steps beneath the root, on rank 0.
        copies: the steps on the disk of its host.
        address: where the rank serves these copies; empty if there are none.
    """

    wanted: int | None
    entries: list[StepInfo]
    copies: list[LocalCopy]
    address: bytes


class Restorer:
    """Restores a state from one of the steps. All ranks make the same calls in the same order.

    Args:
        run: the manager's run.
        deletions: the manager's deletions; they spare the step that is being read.
        read: the options of the loads.
        tier: the tier on the hosts' own disks, if there is one.

    Attributes:
        leftovers: the paths of the incomplete steps that the last restore has not warned about.
        skipped: number of damaged steps that the last restore skipped.
        report: how the state compared with the step restored last; None before the first restore,
            or if torch's own ``dcp.load`` loaded the step.
    """

    def __init__(
        self, run: RunContext, deletions: Deletions, read: ReadOptions, tier: Tier | None
    ) -> None:
        self._run = run
        self._tier = tier
        self._disks = run.store if isinstance(run.store, TieredSteps) else None
        self._deletions = deletions
        self._read = read
        self.leftovers: list[str] = []
        self.skipped = 0
        self.report: LoadReport | None = None

    def restore(
        self,
        state: State,
        step: int | None,
        *,
        state_of: Callable[[int], State] | None = None,
        **arguments: Unpack[LoadArguments],
    ) -> int | None:
        """Restores the state from a step.

        Args:
            state, step: see :meth:`torch_ckpt.CheckpointManager.restore`.
            state_of: returns the state for a step, instead of ``state``. Called after a step has
                been chosen, again for each older step that is tried after a damaged one, and never
                if the root has no step. The step is loaded into the structure of this state (see
                :class:`LoadRun`).
            arguments: see :func:`torch_ckpt.load`. With ``free_before_read``, a damaged step is an
                error, because the objects of the state may already have been deleted.

        Returns:
            The restored step; None if the root has no step.

        Raises: see :meth:`torch_ckpt.CheckpointManager.restore`.
        """
        # Each attempt reads these again, so convert iterators to tuples.
        arguments["names"] = reusable(arguments.get("names"))
        arguments["rename"] = reusable(arguments.get("rename"))
        arguments["restores_structure"] = state_of is None
        try:
            return self._restore(state, step, state_of, arguments)
        finally:
            if self._disks is not None:
                self._disks.stop_serving()

    def _restore(
        self,
        state: State,
        step: int | None,
        state_of: Callable[[int], State] | None,
        arguments: LoadArguments,
    ) -> int | None:
        self.skipped, self.report = 0, None
        found = self._agree_on_candidates(step, state)
        candidates, unmarked, mixture = found.steps, found.unmarked, found.mixture
        self.leftovers = found.leftovers
        may_skip = step is None and not arguments.get("free_before_read")
        if unmarked and self._run.rank == 0:
            warn(self._describe_unmarked(unmarked))
        if mixture and step is None and self._run.rank == 0:
            warn(f"{self._run.store.root}: {mixture}")
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
                    if state_of is not None:
                        state = self._ask_for_state(candidate, state_of)
                    report = self._load(candidate, found, state, arguments)
                except CheckpointException as error:
                    if not may_skip or not is_damage(error) or is_elsewhere(error):
                        raise
                    damages.append(f"step {candidate}: {causes(error)}")
                    existing = self._agree_on_candidates(None, state).steps
                    if candidate in existing:
                        self._report_skipped(candidate, damages[-1], candidates)
                    else:
                        # Another run has deleted the step, after saving a newer one.
                        damages[-1] += "; the step has since been deleted"
                        deleted += 1
                        candidates = [other for other in existing if other not in tried]
                    continue
            self.skipped = len(damages) - deleted
            if self._tier is not None:
                self._tier.restored()
            # With a planner, there is no comparison.
            self.report = report if isinstance(report, LoadReport) else None
            return candidate
        raise CheckpointError(
            f"no step in {self._run.store.root} can be loaded; refusing to start from scratch "
            f"silently: {'; '.join(damages)}"
        )

    def _load(
        self, step: int, found: _Candidates, state: State, arguments: LoadArguments
    ) -> LoadReport | Checkpoint:
        """Loads a step. If the load of copies on the hosts' disks fails, verifies the copies, and
        loads the intact ones, and the files of the root."""
        try:
            return self._load_copies(step, found, state, arguments)
        except CheckpointException as error:
            if step not in found.choices or not may_be_damage(error):
                raise
            choice = found.choices[step]
            again = self._agree_on_candidates(None, state, [step])
            other = again.choices.get(step)
            is_same = choice.is_in_root if other is None else other.digest == choice.digest
            if step not in again.steps or not is_same:
                raise
            if self._run.rank == 0:
                warn(f"step {step}: {causes(error)}; reading other copies of the files")
        return self._load_copies(step, again, state, arguments)

    def _load_copies(
        self, step: int, found: _Candidates, state: State, arguments: LoadArguments
    ) -> LoadReport | Checkpoint:
        if self._disks is not None:
            self._disks.choose(step, found.choices.get(step), found.addresses)
        return self._load_with_retries(step, state, arguments)

    def _ask_for_state(self, step: int, state_of: Callable[[int], State]) -> State:
        """Calls ``state_of`` on all ranks. If it fails on one of them, all ranks raise."""
        with (
            CollectiveCall(_CALL, self._run.process_group, self._run.timeout) as call,
            call.alive(time.monotonic_ns),
        ):
            return call.run_on_all(lambda: state_of(step))

    def _report_skipped(self, step: int, damage: str, candidates: list[int]) -> None:
        self._run.report(Event("damaged", step, self._run.rank, message=f"{damage}; skipped"))
        if self._run.rank == 0:
            older = f"falling back to step {candidates[0]}" if candidates else "no step is left"
            warn(f"{damage}; {older}")

    def _describe_unmarked(self, paths: list[str]) -> str:
        shown = some_of(paths)
        why = (
            "They are still being saved, their save was interrupted, or they were copied without "
            "this file. A sweep removes them once they have not been written to for an hour."
            if self._run.store.sweeps_what_lacks_markers
            else "They were saved or copied without this file. Each is kept until training saves "
            "its step."
        )
        return (
            f"not restoring directories without {MARKER_NAME}: {shown}. {why} To use a complete "
            f"checkpoint as a step, create an empty file {MARKER_NAME} in its directory."
        )

    def _agree_on_candidates(
        self, step: int | None, state: State, suspects: Collection[int] = ()
    ) -> _Candidates:
        """Returns the same candidates on all ranks.

        Args:
            suspects: the steps whose copies on the hosts' disks are verified.
        """

        def list_steps() -> _Listing:
            # Otherwise, an empty root would accept anything.
            require_state(state)
            run = self._run
            with call.alive(time.monotonic_ns):
                copies, address, entries = run.store.copies(suspects), b"", []
                if self._disks is not None:
                    address = self._disks.serve(copies, run.rank, run.timeout)
                if run.rank == 0:
                    # Wait for pending deletions: they could delete the step that is chosen here.
                    self._deletions.wait_until_idle()
                    entries = run.store.entries()
            return _Listing(step, entries, copies, address)

        def combine(listings: list[_Listing]) -> _Candidates | Disagreement:
            if len({listing.wanted for listing in listings}) > 1:
                return Disagreement(
                    "ranks request different steps:",
                    [f"rank {rank}: {one.wanted}" for rank, one in enumerate(listings)],
                )
            entries = listings[0].entries
            saves = saves_on_disks([listing.copies for listing in listings])
            if self._disks is not None:
                saves = [one for one in saves if not self._disks.is_forgotten(one.step, one.key)]
            infos, choices = choose(entries, saves)
            current, abandoned = by_lineage(infos)
            return _Candidates(
                [info.step for info in current + abandoned],
                [info.path for info in entries if info.lacks_marker],
                [info.path for info in entries if not info.complete and not info.lacks_marker],
                describe_mixture(current, abandoned),
                choices,
                [listing.address for listing in listings],
            )

        with CollectiveCall(_CALL, self._run.process_group, self._run.timeout) as call:
            found = call.agree(list_steps, combine)
        if step is None:
            return found
        if step in found.steps:
            return found._replace(steps=[step])
        is_unmarked = any(path.endswith(f"/{step_name(step)}") for path in found.unmarked)
        problem = f"has no {MARKER_NAME}" if is_unmarked else "does not exist"
        complete = sorted(found.steps)
        listing = f"the complete steps are {complete}" if complete else "no step is complete"
        raise FileNotFoundError(2, f"step {step} {problem}; {listing}", self._run.store.root)

    def _load_with_retries(
        self, step: int, state: State, arguments: LoadArguments
    ) -> LoadReport | Checkpoint:
        run = self._run
        arguments |= {"process_group": run.process_group, "timeout": run.timeout}
        delays = iter(_RETRY_SECONDS)
        while True:
            try:
                return run.store.load(step, state, self._read, **arguments)
            except CheckpointException as error:
                # All ranks receive the same failures, so all of them wait and retry.
                seconds = next(delays, None)
                if seconds is None or not is_elsewhere(error):
                    raise
                time.sleep(seconds)
