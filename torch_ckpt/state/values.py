"""Loads state dicts, including values that have a state of their own, such as modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torch_ckpt import _C, _core
from torch_ckpt._base.formatting import MOST_NAMES, some_of
from torch_ckpt._base.log import LOGGER, warn
from torch_ckpt.checkpoint.chunks import chunks_here
from torch_ckpt.checkpoint.read_options import LEAST_INFLIGHT_BYTES
from torch_ckpt.errors import LoadMismatch
from torch_ckpt.loading.load import Load, Match, StateDict, Strict, T
from torch_ckpt.loading.reader import require_one_version
from torch_ckpt.loading.report import LoadReport, ReadMemory
from torch_ckpt.loading.shared_reads import read_once
from torch_ckpt.ranks.exchange import Answers, Exchange
from torch_ckpt.state.app_state import States, has_state
from torch_ckpt.state.splitting import OBJECTS


class Targets:
    """Builds the targets of a load from the values of a state dict, and restores the values.

    Values that have a state are loaded in the same way as by :class:`torch_ckpt.AppState`. So are
    plain values that the checkpoint stores in AppState's layout, as a manager's checkpoint does.

    Args:
        state_dict: names and values.
        only_compared: True if nothing is read into the targets. Modules may then be on the meta
            device.

    Attributes:
        stateful: the keys of values that have a state, sorted. All ranks read the values in this
            order, because ``state_dict()`` may be a collective operation.
    """

    def __init__(self, state_dict: StateDict, *, only_compared: bool = False) -> None:
        self.stateful = sorted(
            key
            for key, value in state_dict.items()
            if not isinstance(value, torch.Tensor) and has_state(value)
        )
        self._only_compared = only_compared
        self._state_dict = state_dict
        self._states = States(state_dict, wraps_errors=False)
        self._by_state = set(self.stateful)

    def build(self, keys: Iterable[str], load: Load) -> StateDict:
        """Returns the targets for the values of these keys."""
        return {key: self._build_target(key, load) for key in keys}

    def build_all(self, load: Load) -> StateDict:
        """Returns the targets for all values, in the order of the state dict."""
        values = dict(self._state_dict)
        values.update(self.build(self.stateful, load))
        others = [k for k, v in self._state_dict.items() if not isinstance(v, torch.Tensor)]
        values.update(self.build((k for k in others if k not in self._by_state), load))
        return values

    def is_own_target(self, key: str) -> bool:
        """True if a value is loaded directly, not through a state."""
        return key not in self._by_state

    def require_nonempty(self, report: LoadReport) -> None:
        """Raises LoadMismatch if the checkpoint has values for a dict that is empty in the state.

        A load would skip these values.
        """
        if not report.unexpected:
            return
        plain = {k: v for k, v in self._state_dict.items() if k not in self._by_state}
        for empty in _empty_dicts(plain):
            beneath = [name for name in report.unexpected if name.startswith(f"{empty}.")]
            if beneath:
                raise LoadMismatch(
                    f"{empty} is an empty dict, but the checkpoint has {some_of(beneath)}. Pass "
                    "the optimizer or other object itself instead of its state_dict(), or omit "
                    f"{empty}",
                    report,
                )

    def restore(self, key: str, loaded: Any) -> None:
        """Restores the value of a key from its loaded target."""
        if key not in self._by_state:
            self._state_dict[key] = loaded
            return
        before = self._state_dict[key]
        self._states.apply(key, loaded)
        if key not in self.stateful:
            self._state_dict[key] = _update_containers(before, self._state_dict[key])

    def warn_of_missing_ranks(self) -> None:
        """Warns about values for which the checkpoint has no state of this rank."""
        self._states.warn_of_missing_ranks()

    def _build_target(self, key: str, load: Load) -> Any:
        value = self._state_dict[key]
        if key not in self._by_state:
            if isinstance(value, torch.Tensor) or f"{key}.{OBJECTS}" not in load.index:
                return value
            # The value is already in AppState's layout.
            if isinstance(value, Mapping) and OBJECTS in value:
                return value
            self._by_state.add(key)
        is_only_compared = self._only_compared and isinstance(value, torch.nn.Module)
        return self._states.read(key, for_load=not is_only_compared)


def _empty_dicts(value: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """Yields the names of empty dicts within nested dicts."""
    for key, part in value.items():
        if isinstance(part, Mapping):
            yield from _empty_dicts(part, f"{prefix}{key}.") if part else [f"{prefix}{key}"]


def _update_containers(old: Any, new: Any) -> Any:
    """Returns the new value, reusing the dicts and lists of the old value in place."""
    if type(old) is dict and type(new) is dict:
        merged = {key: _update_containers(old.get(key), part) for key, part in new.items()}
        old.clear()
        old.update(merged)
        return old
    if type(old) is list and type(new) is list:
        old[:] = [
            _update_containers(old[i] if i < len(old) else None, part) for i, part in enumerate(new)
        ]
        return old
    return new


def load_values(
    state_dict: StateDict,
    load: Load,
    ranks: Exchange,
    *,
    strict: Strict,
    process_group: dist.ProcessGroup | None,
) -> LoadReport:
    """Loads all values of a state dict, on every rank.

    Args:
        state_dict: names and values, which are filled in place or replaced.
        strict: require that all names match; see :func:`torch_ckpt.load`.
        process_group: ranks that share reads; None for the default group.

    Raises:
        CheckpointException: a rank failed; raised on every rank with the cause from each failed
            rank.
    """
    targets = Targets(state_dict)

    def prepare() -> Match:
        match = load.match(targets.build_all(load))
        load.require_fit(match.report, strict)
        if strict and load.loads_all:
            targets.require_nonempty(match.report)
        return match

    match = _plan_on_all_ranks(ranks, load, prepare, lambda match: match.report)

    def read() -> None:
        with ranks.alive(load.reader.moved):
            if load.reader.read_once and ranks.distributed:
                read_once(load.reader, lambda: load.begin(match), process_group)
            else:
                load.reader.read(load.begin(match))

    def restore() -> None:
        # All other values have been filled in place.
        old_and_new = zip(state_dict.items(), match.values.values(), strict=True)
        replaced = [key for (key, old), new in old_and_new if new is not old]
        for key in sorted({*replaced, *targets.stateful}):
            if load.loads_all or key in match.loaded_keys:
                targets.restore(key, match.values[key])
        targets.warn_of_missing_ranks()

    ranks.run("load", read)
    ranks.run("finish", restore)
    return match.report


def load_values_freeing(
    state_dict: StateDict, load: Load, ranks: Exchange, *, strict: Strict
) -> LoadReport:
    """Loads a state that is too large to fit into memory twice.

    Loads one key at a time, because ``state_dict()`` may return a copy, and deletes each object
    before reading its replacement.
    """
    targets = Targets(state_dict)
    # All ranks call a value's state_dict() in the same step, because it may be a collective.
    stateful = targets.stateful
    plain = sorted(state_dict.keys() - set(stateful))
    steps = [plain, *([key] for key in stateful)]
    total = LoadReport()

    def begin() -> None:
        # Start with all names in the checkpoint. Comparing a key removes the names beneath it.
        total.unexpected = load.match({}).report.unexpected

    def compare(keys: list[str]) -> None:
        for key in keys:
            total.add(load.match(targets.build([key], load)).report)

    def read_key(key: str) -> None:
        values = targets.build([key], load)
        is_own_target = targets.is_own_target(key)
        match = load.match(values)
        is_loaded = load.loads_all or key in match.loaded_keys
        # Only `reading` may refer to the values, so that they can be freed during the read.
        reading = load.begin(match)
        del match

        def release() -> None:
            if is_own_target:
                state_dict[key] = None

        load.read_freeing(reading, release)
        if is_loaded:
            targets.restore(key, values[key])

    def read(keys: list[str]) -> None:
        with ranks.alive(load.reader.moved):
            for key in keys:
                read_key(key)

    _require_same_keys(ranks, begin, stateful)
    for keys in steps:
        ranks.run("plan", partial(compare, keys))

    def require_fit() -> None:
        load.require_fit(total, strict)
        if strict and load.loads_all:
            targets.require_nonempty(total)

    _plan_on_all_ranks(ranks, load, require_fit, lambda _none: total)
    for keys in steps:
        ranks.run("load", partial(read, keys))
    targets.warn_of_missing_ranks()
    return total


def _plan_on_all_ranks(
    ranks: Exchange, load: Load, local: Callable[[], T], report_of: Callable[[T], LoadReport]
) -> T:
    """Runs ``local`` on all ranks and returns its result on this rank.

    Raises on all ranks if a pattern matched nothing on any rank, or if the ranks read the metadata
    of different saves. Rank 0 warns about names that any rank skips.
    """

    def on_this_rank() -> tuple[tuple[list[str], str | None, list[str]], T]:
        kept = local()
        return (load.unmatched, load.reader.version, report_of(kept).skipped), kept

    def check(found: list[tuple[list[str], str | None, list[str]]]) -> Answers[list[str]]:
        require_one_version((version for _unmatched, version, _skipped in found), load.reader)
        unmatched = [patterns for patterns, _version, _skipped in found]
        require_matches(p for p in unmatched[0] if all(p in patterns for patterns in unmatched))
        skipped = dict.fromkeys(name for _unmatched, _version, names in found for name in names)
        return Answers([list(skipped), *([] for _other in found[1:])])

    skipped, kept = ranks.exchange("plan", on_this_rank, check)
    if skipped:
        path, loaded = load.reader.checkpoint_id, report_of(kept).loaded
        LOGGER.info("%s: %d names match, %d skipped", path, len(loaded), len(skipped))
        # Attribute the warning to the line that calls load.
        warn(f"{path}: skipped because of strict=False: {some_of(skipped)}", stacklevel=4)
    return kept


def _require_same_keys(ranks: Exchange, local: Callable[[], None], keys: list[str]) -> None:
    """Runs ``local`` on all ranks. Raises on all of them if their keys differ."""

    def on_this_rank() -> tuple[list[str], None]:
        local()
        return keys, None

    def check(keys_of_all: list[list[str]]) -> None:
        for rank, others in enumerate(keys_of_all):
            if others != keys_of_all[0]:
                raise ValueError(
                    "free_before_read=True requires that all ranks have values with a state under "
                    f"the same keys: rank 0 has {keys_of_all[0][:MOST_NAMES]}, rank {rank} has "
                    f"{others[:MOST_NAMES]}"
                )

    ranks.exchange("plan", on_this_rank, check)


def require_matches(unmatched: Iterable[str]) -> None:
    """Raises ValueError if there are patterns that match nothing."""
    patterns = ", ".join(map(repr, unmatched))
    if patterns:
        raise ValueError(f"no name in the state dict matches {patterns}")


def estimate(load: Load, state_dict: StateDict) -> ReadMemory:
    """Estimates the memory that a load into the values needs. Reads only the metadata."""
    match = load.match(Targets(state_dict, only_compared=True).build_all(load))
    require_matches(load.unmatched)
    load.require_fit(match.report, strict=True)
    reads = match.reading.tensors
    targets = [(read.tensor, read.tensor.numel() * read.dtype.itemsize) for read in reads]
    limit = load.reader.options.max_inflight_bytes
    objects = [read.length for read in match.reading.objects]
    # If the engine cannot write into a target, it reads into a copy, one slice of dimension 0 at a
    # time. The limit must allow for the largest slice.
    copies = [(target, size) for target, size in targets if not _is_read_in_place(target)]
    slices = (size // max(t.size(0) if t.dim() else 1, 1) for t, size in copies)
    least = max([0, *slices, *objects])
    scratch = load.reader.options.threads * _core.load_chunk_bytes
    if reads.cuda_devices:
        scratch *= 2
    scratch = min(scratch, limit) if targets else 0
    held = min(sum(size for _target, size in copies), limit // 2)
    wave = min(sum(objects), max([load.reader.wave_bytes, *objects]))
    return ReadMemory(
        target_bytes=sum(_local_bytes(match.state.value(row)) for row in match.state.loaded()),
        stored_bytes=reads.stored_bytes + sum(objects),
        beyond_targets_bytes=min(max(scratch + held, wave), limit),
        least_inflight_bytes=max(least + _core.least_scratch_bytes, LEAST_INFLIGHT_BYTES),
    )


def _is_read_in_place(target: torch.Tensor) -> bool:
    # The load replaces a meta tensor with a plain tensor.
    return target.is_meta or (_C.is_plain(target) and not (target.is_conj() or target.is_neg()))


def _local_bytes(value: Any) -> int:
    """Returns the size of this rank's part of a tensor; 0 for other values."""
    try:
        chunks = chunks_here(value)
    except ValueError:
        return 0
    return sum(c.sizes.numel() for c in chunks) * int(value.dtype.itemsize)
