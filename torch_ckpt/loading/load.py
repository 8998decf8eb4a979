"""Loads a state dict, including values that have a state of their own, such as modules.

1. Every rank builds targets for the values, and compares them with the checkpoint: names, kinds,
   shapes and dtypes. If any rank cannot load, all ranks raise, and no value has been changed. Ranks
   exchange plans and metadata only for ``read_once``. If ranks have found different newest steps of
   a root on a network file system, all ranks begin again, for up to 30 s: a host may list a step
   that another host has saved only after some time.
2. Every rank allocates memory for the meta tensors to load, and reads the values that it needs. The
   engine plans the reads from the index. torch describes the parts of tensors that the engine does
   not know, such as ShardedTensors (checkpoint/flat_state.py). Tensors are filled in place.
3. Every rank restores the other values: it replaces plain values, and passes states to the objects
   that have one.

With ``free_before_read``, steps 2 and 3 are made for one top-level key at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import closing
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner

from torch_ckpt import _C, _core
from torch_ckpt._base.checks import require_choice, reusable
from torch_ckpt._base.cuda_events import refuse_capture
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.formatting import MOST_NAMES, some_of
from torch_ckpt._base.log import LOGGER, warn
from torch_ckpt.checkpoint.chunks import local_chunks
from torch_ckpt.checkpoint.dtypes import warn_of_lost_precision
from torch_ckpt.checkpoint.flat_state import flatten_sharded_tensors
from torch_ckpt.checkpoint.index import METADATA_NAME
from torch_ckpt.checkpoint.opened import Checkpoint
from torch_ckpt.checkpoint.reading import Reading
from torch_ckpt.checkpoint.shared_directory import PAUSE_SECONDS, STALE_SECONDS
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.errors import LoadMismatch
from torch_ckpt.loading.match import (
    Chosen,
    Match,
    StateDict,
    allocate,
    compare,
    flattened_as_2_3,
    memory_of,
    torchs_words,
)
from torch_ckpt.loading.page_cache import DifferentSaves, RankReads, want_same_bytes
from torch_ckpt.loading.reader import load_by_dcp
from torch_ckpt.loading.renaming import Rename, new_names, rename_in, suggested_rename
from torch_ckpt.loading.report import LoadReport, Names, ReadMemory
from torch_ckpt.loading.shared_reads import open_once, read_once
from torch_ckpt.options import LEAST_INFLIGHT_BYTES
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.ranks.failures import CheckpointFailed
from torch_ckpt.ranks.group import TIMEOUT_SECONDS, RankGroup
from torch_ckpt.state.placeholders import Stored
from torch_ckpt.state.splitting import OBJECTS
from torch_ckpt.state.states import States

#: True if all values of a state dict must fit the checkpoint; "dtypes" if also their dtypes must.
Strict = bool | Literal["dtypes"]


class LoadArguments(TypedDict, total=False):
    """Arguments of :func:`load`; see :func:`torch_ckpt.load` and, for ``restores_structure``,
    :class:`LoadRun`."""

    planner: LoadPlanner | None
    process_group: dist.ProcessGroup | None
    no_dist: bool
    strict: Strict
    names: Names
    rename: Rename
    free_before_read: bool
    timeout: float
    restores_structure: bool


class _PlanMessage(NamedTuple):
    """A message of a rank about its plan.

    Attributes:
        unmatched: the patterns in ``names`` that match none of its names.
        skipped: the names that it does not load, with the reasons.
        by_state: True if it restores values through their state.
        reads: what it reads.
    """

    unmatched: list[str]
    skipped: list[str]
    by_state: bool
    reads: RankReads


def load(
    state_dict: StateDict,
    source_of: Callable[[], Source],
    *,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    strict: Strict = True,
    names: Names = None,
    rename: Rename = None,
    free_before_read: bool = False,
    timeout: float = TIMEOUT_SECONDS,
    restores_structure: bool = False,
) -> LoadReport | Checkpoint:
    """Loads a checkpoint into a state dict.

    Args:
        state_dict, planner, process_group, no_dist, strict, names, rename, free_before_read,
            timeout: see :func:`torch_ckpt.load`.
        source_of: creates the source. If it fails, the load fails on all ranks.
        restores_structure: see :class:`LoadRun`. It has no effect with a planner.

    Raises:
        CheckpointException: on every rank, with the cause of each rank that failed.
    """
    # Do this before anything can fail, so that all ranks count the same loads.
    ranks = Exchange.open(RankGroup.of(process_group, no_dist), "load", timeout)
    if planner is not None:
        is_strict = (
            bool(strict)
            and not isinstance(strict, str)
            and names is None
            and rename is None
            and not free_before_read
        )
        return load_by_dcp(state_dict, source_of, planner, ranks, process_group, is_strict)
    # A load may be repeated.
    names = None if names is None else reusable(names)
    rename = None if rename is None else reusable(rename)
    try:
        with ranks:
            if isinstance(strict, str):
                require_choice("strict", strict, ("dtypes",))
            states = States(state_dict)
            _require_replaceable(states.values)
            deadline = time.monotonic() + STALE_SECONDS
            while True:
                with closing(source_of()) as source:
                    if free_before_read and source.options.read_once:
                        raise ValueError("Pass either free_before_read or read_once, not both.")
                    run = LoadRun(
                        source, ranks, states, names, rename, restores_structure=restores_structure
                    )
                    try:
                        if free_before_read:
                            run.run_freeing(strict)
                        else:
                            run.run(strict, process_group)
                        if source.narrowed:
                            warn_of_lost_precision(source.narrowed)
                        return run.report
                    except CheckpointFailed as error:
                        if free_before_read or not run.has_stale_source(error, deadline):
                            raise
                time.sleep(PAUSE_SECONDS)
    except CheckpointFailed as error:
        # Drop the frames, which only show the exchange between ranks. The causes keep their own.
        raise error.with_traceback(None) from error.__cause__


class LoadRun:
    """A load on this rank. The methods follow the steps in the module's docstring.

    Values that have a state are loaded through their state (state/states.py). So are lists with
    tensors, and plain values that the checkpoint stores as a former manager did.

    Args:
        source: the checkpoint, which the run opens.
        ranks: the ranks that load together. If there is no metadata for all ranks, because the
            ranks saved without collectives, each rank reads its own metadata.
        states: the values, which are filled in place or replaced.
        names: selects names of the state dict to load; None selects all.
        rename: maps the checkpoint's names to names of the state dict.
        only_compared: True if nothing is read. Modules may then be on the meta device.
        restores_structure: True restores the saved structure of plain values, whose dicts may get
            new keys. False fills the values of the current structure, as ``dcp.load`` does.

    Attributes:
        report: how the values compare with the checkpoint.
    """

    def __init__(
        self,
        source: Source,
        ranks: Exchange,
        states: States,
        names: Names = None,
        rename: Rename = None,
        *,
        only_compared: bool = False,
        restores_structure: bool = False,
    ) -> None:
        source.rank = ranks.rank
        self.report = LoadReport()
        self._source = source
        self._ranks = ranks
        self._states = states
        self._state_dict = states.values
        self._chosen = None if names is None else Chosen(names)
        self._rename = None if rename is None else reusable(rename)
        states.only_compared = only_compared
        self._restores_structure = restores_structure
        # All ranks read the values that have a state in this order, because state_dict() may be a
        # collective operation.
        self._stateful = sorted(states.stateful())
        # The keys of the values that are loaded through States.
        self._by_state = set(self._stateful)
        # The contents of the open checkpoint, and its decoded metadata, both with new names.
        self._stored: Stored | None = None
        self._renamed: Metadata | None = None
        self._metadata_names = METADATA_NAME, _core.metadata_name(ranks.rank)
        # Size and digest of the planned reads of tensors.
        self._read_bytes, self._read_digest = 0, 0

    def run(self, strict: Strict, process_group: dist.ProcessGroup | None) -> None:
        """Loads all values, on every rank.

        Args:
            strict: require that all names match; see :func:`torch_ckpt.load`.
            process_group: ranks that share reads; None for the default group.

        Raises:
            CheckpointException: a rank failed; raised on every rank with the cause from each failed
                rank.
        """
        if self._source.options.read_once and self._ranks.distributed:
            open_once(self._source, self._metadata_names, self._ranks, process_group)
        match, by_state = self._agree(strict)
        assert match is not None
        self._ranks.run("load", partial(self._read, match, process_group))
        if by_state:
            self._ranks.run("finish", partial(self._restore_all, match))
        else:
            self._restore_all(match)

    def has_stale_source(self, error: CheckpointFailed, deadline: float) -> bool:
        """After a failed comparison, returns True on all ranks if ranks have read different saves
        from a network file system.

        Args:
            error: the error of :meth:`run`.
            deadline: the time by time.monotonic() after which all ranks get False.
        """
        causes = [cause for cause, _frames in error.failures.values()]
        if not all(isinstance(cause, LoadMismatch | DifferentSaves) for cause in causes):
            return False
        source = self._source

        def combine(found: list[tuple[RankReads, bool]]) -> bool:
            try:
                want_same_bytes([reads for reads, _is_stale in found], None, source.title)
            except DifferentSaves:
                return time.monotonic() < deadline and any(is_stale for _reads, is_stale in found)
            return False

        reads = RankReads(resolved=source.resolved)
        send = lambda: ((reads, source.may_be_stale), None)  # noqa: E731
        return self._ranks.exchange("compare", send, combine)[0]

    def run_freeing(self, strict: Strict) -> None:
        """Loads a state that is too large to fit into memory twice.

        Loads one key at a time, because ``state_dict()`` may return a copy, and deletes each object
        before reading its replacement.
        """
        # All ranks call a value's state_dict() in the same step, because it may be a collective.
        plain = sorted(self._state_dict.keys() - set(self._stateful))
        steps = [plain, *([key] for key in self._stateful)]
        self._ranks.exchange("plan", self._begin_freeing, _require_same_keys)
        for keys in steps:
            self._ranks.run("plan", partial(self._compare_keys, keys))
        self._add_tied()
        self._agree(strict, is_matched=True)
        for keys in steps:
            self._ranks.run("load", partial(self._read_freeing, keys))
        self._states.warn_of_differences()

    # --- 1. the plan -----------------------------------------------------------------------------

    def match(self) -> Match:
        """Compares all values with the checkpoint. Changes no value. Releases the metadata, so call
        it only once."""
        refuse_capture()
        targets = dict(self._state_dict)
        # Open the checkpoint after state_dict() of all values: if this rank fails earlier, other
        # ranks wait in a collective operation.
        targets.update((key, self._target(key)) for key in self._stateful)
        self._open()
        for key, value in self._state_dict.items():
            # A tensor is its own target unless the structure is restored.
            is_filled = isinstance(value, torch.Tensor) and not self._restores_structure
            if not is_filled and key not in self._by_state:
                targets[key] = self._target(key)
        match = self._match(targets, is_last=True)
        self.report = match.report
        if self.report.missing:
            self._suggest_rename()
        return match

    @no_gc()
    def _open(self) -> None:
        source = self._source
        if source.index is None:  # open_once() has opened nothing
            source.open(self._metadata_names)
        assert source.index is not None
        index, old_names = source.index, {}
        if self._rename is not None:
            new = new_names(index.names(), self._rename)
            index = index.renamed(list(new.values()))
            old_names = {name: old for old, name in new.items()}
        self._stored = Stored(
            index,
            self._metadata,
            self._read_objects,
            old_names,
            source.size_rule,
            loads_all=self._chosen is None,
        )

    def _target(self, key: str) -> Any:
        """Returns the target for the value of a key."""
        value = self._state_dict[key]
        if key not in self._by_state:
            assert self._stored is not None
            index = self._stored.index
            # The tensors of a list may have other numbers and shapes than when it was saved.
            has_new_structure = not isinstance(value, torch.Tensor) and (
                f"{key}.{OBJECTS}" in index or (isinstance(value, list) and key not in index)
            )
            if not (self._restores_structure or has_new_structure):
                return value
            self._by_state.add(key)
        return self._states.read(key, for_load=True)

    @no_gc()
    def _match(self, targets: StateDict, *, is_last: bool = False) -> Match:
        """Compares a complete or partial state dict with the checkpoint, and plans the reads of all
        values that fit.

        Args:
            is_last: True to release the metadata, unless torch must read records with it. Only the
                index is available afterwards.
        """
        assert self._stored is not None
        state = _C.LoadState(targets, local_chunks)
        flatten_sharded_tensors(state)
        match = compare(targets, state, self._stored, self._chosen)
        if match.report.missing and match.report.unexpected:
            old = flattened_as_2_3(targets)
            if not old.keys().isdisjoint(match.report.unexpected):
                state = _C.LoadState({}, local_chunks)
                for name, (path, value) in old.items():
                    state.add(name, path, value)
                match = compare(targets, state, self._stored, self._chosen)
        if is_last and not self._stored.index.has_transformed:
            self._renamed = None
            self._source.release_metadata()
        match.plan()
        if dist.is_initialized():
            self._read_bytes += match.reading.tensors.stored_bytes
            self._read_digest ^= match.reading.tensors.digest
        return match

    def _suggest_rename(self) -> None:
        """Finds the renaming that would make all missing names fit, unless ``rename`` is set."""
        missing, unexpected = self.report.missing, self.report.unexpected
        if missing and unexpected and self._rename is None:
            assert self._stored is not None
            names = self._stored.index.names()
            self.report.rename = suggested_rename(names, missing, unexpected)

    def _metadata(self) -> Metadata:
        """Returns the metadata, decoded into torch's objects."""
        if self._renamed is None:
            self._renamed = self._source.metadata()
            rename_in(self._renamed, self._rename)
        return self._renamed

    def _read_objects(self, names: Iterable[str]) -> StateDict:
        """Reads objects before the load. Leaves out objects that only torch's code can read."""
        assert self._stored is not None
        values: StateDict = {}
        state = _C.LoadState({}, local_chunks)
        for name in names:
            state.add(name, (name,), None)
        state.match(self._stored.index, self._source.size_rule, None)
        objects = state.plan(_C.TensorReads())
        reads = [state.object_read(row) for row in objects if not state.is_transformed(row)]
        self._source.read(Reading(values=values, objects=reads))
        return values

    def _require_fit(self, strict: Strict) -> None:
        """Raises LoadMismatch if the checkpoint does not fit the state dict.

        If ``strict`` is true, every value must fit, and the checkpoint must not have values for a
        dict that is empty in the state dict: a load would skip these values. Otherwise, each
        top-level dict and ``Stateful`` value must have at least one value that can be loaded, and
        so must the state dict.
        """
        report = self.report
        is_refused = bool(report.refused) or (strict and not report.fits)
        if is_refused or (strict == "dtypes" and report.dtypes):
            lines = "\n".join([*torchs_words(report), str(report)])
            raise LoadMismatch(f"the checkpoint does not fit the state dict: {lines}", report)
        if report.absent or not (report.loaded or report.fits):
            what = some_of(report.absent) or "the state dict"
            raise LoadMismatch(
                f"no value of {what} can be loaded from the checkpoint, and strict=False must not "
                "skip a state completely; remove it from the state dict, or choose values with "
                f"names=: {report}",
                report,
            )
        problem = next(self._emptied(), None) if strict else None
        if problem is not None:
            raise LoadMismatch(problem, report)

    def _emptied(self) -> Iterator[str]:
        """Describes the empty dicts for which the checkpoint has values. A load would skip these
        values."""
        unexpected = self.report.unexpected if self._chosen is None else []
        plain = {k: v for k, v in self._state_dict.items() if k not in self._by_state}
        for empty in _empty_dicts(plain) if unexpected else ():
            beneath = [name for name in unexpected if name.startswith(f"{empty}.")]
            if beneath:
                yield (
                    f"{empty} is an empty dict, but the checkpoint has {some_of(beneath)}. Pass "
                    "the optimizer or other object itself instead of its state_dict(), or omit "
                    f"{empty}"
                )

    def _agree(self, strict: Strict, *, is_matched: bool = False) -> tuple[Match | None, bool]:
        """Compares all values on all ranks. Rank 0 warns about names that any rank skips.

        Args:
            is_matched: True if the values have been compared already.

        Returns:
            The comparison on this rank, and True if any rank restores a value through its state,
            which can fail.
        """
        (skipped, by_state, share_bytes), match = self._ranks.exchange(
            "plan", partial(self._plan, strict, is_matched), self._combine
        )
        source, report = self._source, self.report
        if share_bytes:
            source.read_through_cache()
        if skipped and self._ranks.rank == 0:
            path = source.title
            LOGGER.info("%s: %d names match, %d skipped", path, len(report.loaded), len(skipped))
            hint = f". Pass rename={report.rename} to load them" if report.rename else ""
            warn(f"{path}: skipped because of strict=False: {some_of(skipped)}{hint}")
        return match, by_state

    def _plan(self, strict: Strict, is_matched: bool) -> tuple[_PlanMessage, Match | None]:
        match = None
        if is_matched:
            self._suggest_rename()
        else:
            match = self.match()
        self._require_fit(strict)
        plan = _PlanMessage(
            [] if self._chosen is None else self._chosen.unmatched(),
            [] if self.report.fits else self.report.skipped,
            bool(self._by_state),
            RankReads(self._read_bytes, self._read_digest, self._source.resolved),
        )
        return plan, match

    def _combine(self, plans: list[_PlanMessage]) -> tuple[list[str], bool, bool]:
        """Raises ValueError if a pattern matched nothing on any rank."""
        source = self._source
        stored = source.index.stored_bytes if source.index and source.has_all_ranks else None
        share_bytes = want_same_bytes([plan.reads for plan in plans], stored, source.title)
        if plans[0].unmatched:
            _require_matches(
                pattern
                for pattern in plans[0].unmatched
                if all(pattern in plan.unmatched for plan in plans)
            )
        skipped = dict.fromkeys(name for plan in plans for name in plan.skipped)
        return list(skipped), any(plan.by_state for plan in plans), share_bytes

    # --- 2. the reads ----------------------------------------------------------------------------

    def _read(self, match: Match, process_group: dist.ProcessGroup | None) -> None:
        source, begin = self._source, partial(self._begin, match, is_last=True)
        with self._ranks.alive(source.progress):
            if source.options.read_once and self._ranks.distributed:
                read_once(source, begin, process_group)
            else:
                source.read(begin())

    def _begin(self, match: Match, *, is_last: bool = False) -> Reading:
        """Allocates memory for meta tensors, zeroes the regions that are not stored, and returns
        the reads.

        Args:
            is_last: True to release the flattened state.
        """
        source, state = self._source, match.state
        on_meta = state.loaded_on_meta()
        for row in on_meta:
            real = allocate(state.value(row))
            set_element(match.values, state.path(row), real)
            state.replace(row, real)
            for tied in (tied for tied, other in match.tied if other == row):
                set_element(match.values, state.path(tied), real)
        if on_meta:
            match.plan()
        if source.size_rule != _C.SizeRule.SAME:
            state.zero_unstored()
        reading = match.reading
        if is_last:
            match.state, match.reading = _C.LoadState({}, local_chunks), Reading()
            self._stored = None
        return reading

    # --- 3. the values that are not filled in place ----------------------------------------------

    def _restore_all(self, match: Match) -> None:
        old_and_new = zip(self._state_dict.items(), match.values.values(), strict=True)
        replaced = [key for (key, old), new in old_and_new if new is not old]
        for key in sorted({*replaced, *self._stateful}):
            if key in match.loaded_keys:
                self._restore(key, match.values[key])
        if self._by_state:
            self._states.warn_of_differences()

    def _restore(self, key: str, loaded: Any) -> None:
        """Restores the value of a key from its loaded target."""
        if key not in self._by_state:
            self._state_dict[key] = loaded
            return
        self._states.apply(key, loaded)

    # --- one key at a time -----------------------------------------------------------------------

    def _begin_freeing(self) -> tuple[list[str], None]:
        refuse_capture()
        self._open()
        # Start with all names in the checkpoint. Comparing a key removes the names beneath it.
        self.report.unexpected = self._match({}).report.unexpected
        return self._stateful, None

    def _compare_keys(self, keys: list[str]) -> None:
        for key in keys:
            self.report.add(self._match({key: self._target(key)}).report)

    def _add_tied(self) -> None:
        """Counts a missing tensor as loaded if a loaded tensor has the same memory."""
        report = self.report
        memories = {key: memory_of(value) for key, value in self._state_dict.items()}
        loaded = {memories.get(name) for name in report.loaded} - {None}
        found = [name for name in report.missing if memories.get(name) in loaded]
        # The load replaces each meta tensor with a tensor of its own.
        tied = [name for name in found if not self._state_dict[name].is_meta]
        report.loaded += tied
        report.missing = [name for name in report.missing if name not in tied]
        report.absent = [key for key in report.absent if key not in tied]

    def _read_freeing(self, keys: list[str]) -> None:
        with self._ranks.alive(self._source.progress):
            for key in keys:
                self._read_key_freeing(key)

    def _read_key_freeing(self, key: str) -> None:
        """Reads tensors in place. Frees each object before reading its replacement."""
        values = {key: self._target(key)}
        match = self._match(values)
        is_loaded = key in match.loaded_keys
        # Only `reading` may refer to the values, so that they can be freed during the read.
        reading = self._begin(match)
        del match
        objects, reading.objects = reading.objects, []
        self._source.read(reading)
        for read in objects:
            set_element(reading.values, read.target, None)
            if len(read.target) == 1 and key not in self._by_state:
                self._state_dict[key] = None
            self._source.read(Reading(values=reading.values, objects=[read]))
        if is_loaded:
            self._restore(key, values[key])

    # --- without a read --------------------------------------------------------------------------

    def compare(self) -> LoadReport:
        """Compares the values with the checkpoint, for :func:`torch_ckpt.preflight`."""
        report = self.match().report
        _require_matches([] if self._chosen is None else self._chosen.unmatched())
        report.refused += self._emptied()
        return report

    def estimate(self) -> ReadMemory:
        """Estimates the memory that the load needs. Reads only the metadata."""
        match, source = self.match(), self._source
        _require_matches([] if self._chosen is None else self._chosen.unmatched())
        self._require_fit(strict=True)
        reads = match.reading.tensors
        targets = [(read.tensor, read.tensor.numel() * read.dtype.itemsize) for read in reads]
        limit = source.options.max_inflight_bytes
        objects = [read.length for read in match.reading.objects]
        # If the engine cannot write into a target, it reads into a copy, one slice of dimension 0
        # at a time. The limit must allow for the largest slice.
        copies = [(target, size) for target, size in targets if not _is_read_in_place(target)]
        slices = (size // max(t.size(0) if t.dim() else 1, 1) for t, size in copies)
        least = max([0, *slices, *objects])
        scratch = source.options.threads * _core.load_chunk_bytes
        if reads.devices:
            scratch *= 2
        scratch = min(scratch, limit) if targets else 0
        held = min(sum(size for _target, size in copies), limit // 2)
        wave = min(sum(objects), max([source.wave_bytes, *objects]))
        return ReadMemory(
            target_bytes=sum(_local_bytes(match.state.value(row)) for row in match.state.loaded()),
            stored_bytes=reads.stored_bytes + sum(objects),
            beyond_targets_bytes=min(max(scratch + held, wave), limit),
            least_inflight_bytes=max(least + _core.least_scratch_bytes, LEAST_INFLIGHT_BYTES),
        )


def _require_replaceable(state_dict: StateDict) -> None:
    """Raises TypeError for a state dict in which a load cannot replace values by their names."""
    if not isinstance(state_dict, MutableMapping):
        raise TypeError(
            f"a load replaces values of the state, so the state must be a dict, got "
            f"{type(state_dict).__name__}"
        )
    others = [repr(key) for key in state_dict if not isinstance(key, str)]
    if others:
        raise TypeError(
            f"the keys of the state must be texts, got {some_of(others)}. Use str(key) as the key"
        )


def _empty_dicts(value: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """Yields the names of empty dicts within nested dicts."""
    for key, part in value.items():
        if isinstance(part, Mapping):
            yield from _empty_dicts(part, f"{prefix}{key}.") if part else [f"{prefix}{key}"]


def _require_same_keys(keys_of_all: list[list[str]]) -> None:
    """Raises ValueError if ranks have values with a state under different keys."""
    for rank, keys in enumerate(keys_of_all):
        if keys != keys_of_all[0]:
            raise ValueError(
                "free_before_read=True requires that all ranks have values with a state under "
                f"the same keys: rank 0 has {keys_of_all[0][:MOST_NAMES]}, rank {rank} has "
                f"{keys[:MOST_NAMES]}"
            )


def _require_matches(unmatched: Iterable[str]) -> None:
    """Raises ValueError if there are patterns that match nothing."""
    patterns = ", ".join(map(repr, unmatched))
    if patterns:
        raise ValueError(f"no name in the state dict matches {patterns}")


def _is_read_in_place(target: torch.Tensor) -> bool:
    # The load replaces a meta tensor with a plain tensor.
    return target.is_meta or (_C.is_plain(target) and not (target.is_conj() or target.is_neg()))


def _local_bytes(value: Any) -> int:
    """Returns the size of this rank's part of a tensor; 0 for other values."""
    try:
        chunks = local_chunks(value)
    except ValueError:
        return 0
    return sum(c.sizes.numel() for c in chunks) * int(value.dtype.itemsize)
