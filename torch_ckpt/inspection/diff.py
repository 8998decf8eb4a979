"""``diff``: how two checkpoints differ, however each of them is sharded.

1. Names, kinds, shapes and dtypes are compared by the metadata.
2. Tensors of one shape are read from both in boxes of the whole tensor, as many at a time as the
   limit allows. Equal bytes are equal; else values are compared: floating point in float64,
   integers exactly, complex numbers in complex128, dtypes that torch cannot convert by their bytes.
3. Objects are compared by their stored bytes, and never unpickled.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch

from torch_ckpt._base.progress import Progress, ProgressOption, Reporter
from torch_ckpt.errors import CheckpointError
from torch_ckpt.inspection.diff_report import DiffReport, TensorDifference
from torch_ckpt.inspection.listing import matching
from torch_ckpt.inspection.stored_tensors import (
    QUANTIZED,
    Box,
    Record,
    StoredTensors,
    as_float64,
    as_int64,
    boxes,
    empty,
    widened,
)
from torch_ckpt.loading.reader import LEAST_INFLIGHT_BYTES
from torch_ckpt.loading.reading import Row

# Elements that are compared at once: what that takes beside the two tensors stays below 64 MiB.
_AT_ONCE = 1 << 20

_LEAST_INT64 = -(1 << 63)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    max_inflight_bytes: int = 256 << 20,
    progress: ProgressOption = None,
) -> DiffReport:
    """Compares two checkpoints, of stock torch or of ours, in any sharding.

    Args:
        a, b: directories of the checkpoints; or ``ROOT/40`` for step 40 of a run, or ROOT for its
            newest step.
        names: what to compare: names, also without their last parts ("model" for all of
            "model.*"), or patterns as of :mod:`fnmatch`; all if None.
        atol, rtol: values are equal where ``|a - b| <= atol + rtol * |b|``. With one of them given
            another dtype of equal values is not a difference.
        max_inflight_bytes: most memory in bytes that is held, beyond the metadata.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.

    Returns:
        All that differs.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        Unsafe, Corrupt: one of them cannot be read; what is read is verified as by a load.
        OSError: a system call failed.
        CheckpointError: neither checkpoint has a name like one of ``names``.
        ValueError: an option is out of range.
    """
    if isinstance(names, str):
        raise ValueError(f"names must be a list of patterns, got the string {names!r}")
    for title, value in (("atol", atol), ("rtol", rtol)):
        if value is not None and not value >= 0:
            raise ValueError(f"{title} must not be negative, got {value}")
    if max_inflight_bytes < 8 * LEAST_INFLIGHT_BYTES:
        raise ValueError(
            f"max_inflight_bytes must be at least {8 * LEAST_INFLIGHT_BYTES}, "
            f"got {max_inflight_bytes}"
        )
    # A quarter is for what is read of each side, one for the reading, one for comparing.
    at_once = max_inflight_bytes // 4
    report = DiffReport(os.fspath(a), os.fspath(b), atol is not None or rtol is not None)
    sides: list[StoredTensors] = []
    try:
        for path in (a, b):
            sides.append(StoredTensors(path, at_once))
        report.a, report.b = (side.path for side in sides)
        chosen = None
        if names is not None:
            present = {name for side in sides for name in side.names}
            chosen = set(matching(present, list(names), f"{report.a} and {report.b}"))
        _Comparison(sides[0], sides[1], report, atol or 0.0, rtol or 0.0, at_once).run(
            progress, chosen
        )
    except ValueError as error:
        raise CheckpointError(f"{a} and {b} cannot be compared: {error}") from error
    finally:
        for side in sides:
            side.reader.release()
    return report


@dataclass
class _Tally:
    """What has been found of one tensor so far."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    differing: int = 0
    outside: int = 0
    absolute: float | int = -1
    relative: float = -1.0
    index: tuple[int, ...] | None = None
    bits_differ: bool = False
    only_bytes: bool = False


class _Comparison:
    def __init__(
        self,
        a: StoredTensors,
        b: StoredTensors,
        report: DiffReport,
        atol: float,
        rtol: float,
        at_once: int,
    ) -> None:
        self._a, self._b, self._report = a, b, report
        self._atol, self._rtol = atol, rtol
        self._at_once = at_once
        # Boxes that are read together: name, box, and what is filled of either side.
        self._wave: list[tuple[_Tally, Box, torch.Tensor, torch.Tensor]] = []
        self._wave_bytes = 0

    def run(self, progress: ProgressOption, chosen: set[str] | None) -> None:
        """Compares the chosen names; all if None."""
        report = self._report
        of_a, of_b = (
            [name for name in side.names if chosen is None or name in chosen]
            for side in (self._a, self._b)
        )
        report.only_in_a = [name for name in of_a if name not in self._b]
        report.only_in_b = [name for name in of_b if name not in self._a]
        tensors: list[_Tally] = []
        by_record: list[str] = []
        objects: list[str] = []
        total = 0
        for name in of_a:
            if name not in self._b:
                continue
            a, b = self._a.tensor(name), self._b.tensor(name)
            if a is None and b is None:
                objects.append(name)
            elif a is None or b is None:
                kinds = ["an object" if side is None else "a tensor" for side in (a, b)]
                report.kinds.append((name, kinds[0], kinds[1]))
            elif a.shape != b.shape:
                report.shapes.append((name, a.shape, b.shape))
            else:
                dtypes = a.dtype, b.dtype
                if dtypes[0] != dtypes[1]:
                    in_a, in_b = (str(dtype).removeprefix("torch.") for dtype in dtypes)
                    report.dtypes.append((name, in_a, in_b))
                if not any(dtype in QUANTIZED for dtype in dtypes):
                    tensors.append(_Tally(name, a.shape, dtypes))
                    total += math.prod(a.shape) * sum(d.itemsize for d in dtypes)
                else:
                    by_record.append(name)
        self._compare_all(tensors, total, progress)
        for name in by_record:
            self._compare_records(name)
        for name in objects:
            if self._same_bytes(name, self._a.places(name)[0], self._b.places(name)[0]):
                report.same += 1
            else:
                report.objects.append(name)

    def _compare_all(self, tallies: list[_Tally], total: int, progress: ProgressOption) -> None:
        with Reporter(progress, "compare", None, total) as shown:
            done = 0

            def advance() -> None:
                nonlocal done
                done += self._wave_bytes
                self._run_wave()
                if shown.active:
                    shown.update(Progress(total, 0, done))

            for tally in tallies:
                dtypes = tally.dtypes
                widest = max(dtype.itemsize for dtype in dtypes)
                for box in boxes(tally.shape, max(1, self._at_once // widest)):
                    count = math.prod(box[1])
                    held = count * sum(dtype.itemsize for dtype in dtypes)
                    if self._wave and self._wave_bytes + held > 2 * self._at_once:
                        advance()
                    a, b = (empty(box[1], dtype) for dtype in dtypes)
                    self._wave.append((tally, box, a, b))
                    self._wave_bytes += held
            advance()
        for tally in tallies:
            self._conclude(tally)

    def _run_wave(self) -> None:
        wave, self._wave, self._wave_bytes = self._wave, [], 0
        for side, which in ((self._a, 2), (self._b, 3)):
            files: dict[str, int] = {}
            rows: list[Row] = []
            for entry in wave:
                target = cast(torch.Tensor, entry[which])
                rows.extend(side.rows(entry[0].name, entry[1], target, files))
            if rows:
                side.reader.read_rows(list(files), rows)
        for tally, box, a, b in wave:
            self._compare(tally, box, a.reshape(-1), b.reshape(-1))

    def _compare(self, tally: _Tally, box: Box, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype == b.dtype:
            if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                return
            tally.bits_differ = True
        for begin in range(0, a.numel(), _AT_ONCE):
            part_a, part_b = a[begin : begin + _AT_ONCE], b[begin : begin + _AT_ONCE]
            try:
                found = _differences(part_a, part_b)
            except (NotImplementedError, RuntimeError):
                # No conversion of this dtype.
                same = a.dtype == b.dtype and torch.equal(
                    part_a.view(torch.uint8), part_b.view(torch.uint8)
                )
                tally.only_bytes = tally.only_bytes or not same
                continue
            if found is None:
                continue
            self._count(tally, box, begin, found)

    def _count(self, tally: _Tally, box: Box, begin: int, found: _Found) -> None:
        allowed = self._atol + self._rtol * found.of_b
        outside = ~(found.absolute <= allowed) | found.absolute.isinf()
        tally.differing += found.places.numel()
        tally.outside += int(outside.sum())
        relative = found.absolute / torch.maximum(found.of_a, found.of_b)
        relative = relative.nan_to_num(nan=math.inf, posinf=math.inf)
        tally.relative = max(tally.relative, float(relative.max()))
        largest = found.exact(int(found.absolute.argmax()))
        if largest > tally.absolute:
            tally.absolute = largest
            place = begin + int(found.places[found.absolute.argmax()])
            tally.index = _index_of(place, box)

    def _conclude(self, tally: _Tally) -> None:
        report, elements = self._report, math.prod(tally.shape)
        if tally.only_bytes:
            report.tensors.append(
                TensorDifference(tally.name, tally.shape, elements, None, 1, None, None, None)
            )
        elif tally.differing:
            report.tensors.append(
                TensorDifference(
                    tally.name,
                    tally.shape,
                    elements,
                    tally.differing,
                    tally.outside,
                    tally.absolute,
                    tally.relative,
                    tally.index,
                )
            )
        else:
            report.same += 1
            if tally.bits_differ:
                report.bits.append(tally.name)

    def _compare_records(self, name: str) -> None:
        """For quantized tensors and the like: shard by shard, where these are the same."""
        of_a, of_b = self._a.tensor(name), self._b.tensor(name)
        assert of_a is not None
        assert of_b is not None
        in_a = {(place.offsets, place.sizes): place for place in self._a.places(name)}
        in_b = {(place.offsets, place.sizes): place for place in self._b.places(name)}
        if (
            of_a.dtype == of_b.dtype
            and in_a.keys() == in_b.keys()
            and all(self._same_bytes(name, in_a[shard], in_b[shard]) for shard in in_a)
        ):
            self._report.same += 1
            return
        shape = of_a.shape
        self._report.tensors.append(
            TensorDifference(name, shape, math.prod(shape), None, 1, None, None, None)
        )

    def _same_bytes(self, name: str, of_a: Record, of_b: Record) -> bool:
        if of_a.length != of_b.length:
            return False
        return all(
            a == b
            for a, b in zip(
                self._a.record_pieces(name, of_a, self._at_once),
                self._b.record_pieces(name, of_b, self._at_once),
                strict=True,
            )
        )


@dataclass
class _Found:
    """The elements that differ, of some that were compared.

    Attributes:
        places: which they are.
        a, b: their values; of integers exact.
        absolute: how far they are apart, of large integers about so far.
        of_a, of_b: their magnitudes.
    """

    places: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    absolute: torch.Tensor
    of_a: torch.Tensor
    of_b: torch.Tensor

    def exact(self, which: int) -> float | int:
        """How far one of them is apart; of integers the exact number."""
        if self.a.dtype.is_floating_point or self.b.dtype.is_floating_point:
            return float(self.absolute[which])
        if self.a.is_complex() or self.b.is_complex():
            return float(self.absolute[which])
        return abs(int(self.a[which].item()) - int(self.b[which].item()))


def _differences(a: torch.Tensor, b: torch.Tensor) -> _Found | None:
    """The elements whose values differ; None: there are none. NaN is equal to NaN."""
    if not any(t.is_floating_point() or t.is_complex() for t in (a, b)):
        places = _differing_integers(a, b).nonzero().reshape(-1)
        if places.numel() == 0:
            return None
        a, b = _gather(a, places), _gather(b, places)
        in_a, in_b = as_float64(a), as_float64(b)
        return _Found(places, a, b, _apart(a, b, in_a, in_b), in_a.abs(), in_b.abs())
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    wide_a, wide_b = widened(a, wide), widened(b, wide)
    places = (~_same(wide_a, wide_b)).nonzero().reshape(-1)
    if places.numel() == 0:
        return None
    wide_a, wide_b = wide_a[places], wide_b[places]
    absolute = (wide_a - wide_b).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return _Found(places, wide_a, wide_b, absolute, wide_a.abs(), wide_b.abs())


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_complex():
        # A NaN in one part says nothing of the other.
        return _same(torch.view_as_real(a), torch.view_as_real(b)).all(dim=-1)
    return (a == b) | (a.isnan() & b.isnan())


def _gather(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """As values[places], which torch does not have for unsigned integers."""
    if values.dtype == torch.uint64:
        return values.view(torch.int64)[places].view(torch.uint64)
    return values.to(torch.int64)[places]


def _differing_integers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if (a.dtype == torch.uint64) == (b.dtype == torch.uint64):
        return as_int64(a) != as_int64(b)
    # What is negative in one of the two readings the other one does not have.
    return (as_int64(a) != as_int64(b)) | (as_int64(a) < 0) | (as_int64(b) < 0)


def _apart(
    a: torch.Tensor, b: torch.Tensor, in_a: torch.Tensor, in_b: torch.Tensor
) -> torch.Tensor:
    """How far integers are apart, rounded once: large neighbours are the same in float64."""
    bits_a, bits_b = as_int64(a), as_int64(b)
    if (a.dtype == torch.uint64) != (b.dtype == torch.uint64):
        return (in_a - in_b).abs()
    least = _LEAST_INT64 if a.dtype == torch.uint64 else 0
    larger = (bits_a ^ least) > (bits_b ^ least)
    # Modulo 2^64, of which it is less.
    apart = torch.where(larger, bits_a - bits_b, bits_b - bits_a)
    return as_float64(apart.view(torch.uint64))


def _index_of(place: int, box: Box) -> tuple[int, ...]:
    """The index in the tensor of an element of a box, by its place there."""
    index = []
    for offset, length in zip(reversed(box[0]), reversed(box[1]), strict=True):
        place, at = divmod(place, length)
        index.append(offset + at)
    return tuple(reversed(index))
