"""``diff``: compares two checkpoints, regardless of how each is sharded.

1. Compare names, kinds, shapes and dtypes from the metadata.
2. Read tensors of equal shape from both checkpoints in boxes, as many at a time as the memory limit
   allows. If their bytes differ, compare the values: floating point in float64, integers exactly,
   complex numbers in complex128. Compare dtypes that torch cannot convert by their bytes.
3. Compare objects by their stored bytes, without unpickling them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch

from torch_ckpt import _C
from torch_ckpt._base.options import require_at_least
from torch_ckpt._base.progress import Progress, ProgressOption, reporting
from torch_ckpt.checkpoint.read_options import LEAST_INFLIGHT_BYTES
from torch_ckpt.checkpoint.tensor_bytes import empty_tensor
from torch_ckpt.errors import CheckpointError
from torch_ckpt.inspection.diff_report import DiffReport, TensorDifference
from torch_ckpt.inspection.listing import select_names
from torch_ckpt.inspection.stored_tensors import (
    QUANTIZED,
    Box,
    Record,
    StoredTensors,
    as_float64,
    as_int64,
    split_into_boxes,
    widen,
)

# Elements compared per pass. Keeps the temporaries of a comparison below 64 MiB.
_ELEMENTS_PER_PASS = 1 << 20

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
    """Compares two checkpoints written by torch_ckpt or stock torch. Each can have any sharding.

    Args:
        a, b: checkpoint directories. If a run is saved in ROOT, pass ``ROOT/40`` for step 40, or
            ``ROOT`` for the newest step.
        names: names, prefixes ("model" selects "model.*") or :mod:`fnmatch` patterns to compare;
            None compares everything.
        atol, rtol: values are equal if ``|a - b| <= atol + rtol * |b|``; both default to 0. If
            either is given, tensors that differ only in dtype also count as equal.
        max_inflight_bytes: memory limit in bytes, not counting the metadata.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.

    Returns:
        All differences; ``report.equal`` is True if there are none.

    Raises:
        FileNotFoundError: one of the directories has no committed checkpoint.
        Unsafe, Corrupt: a checkpoint cannot be read, or a record fails its checksum.
        OSError: a system call failed.
        CheckpointError: one of ``names`` matches nothing in either checkpoint.
        ValueError: an option is out of range.

    Example::

        report = torch_ckpt.diff("run/40", "run/80", ["model"], atol=1e-6)
        print(report)
    """
    if isinstance(names, str):
        raise ValueError(f"names must be a list of patterns, got the string {names!r}")
    for title, value in (("atol", atol), ("rtol", rtol)):
        if value is not None and not value >= 0:
            raise ValueError(f"{title} must not be negative, got {value}")
    require_at_least("max_inflight_bytes", max_inflight_bytes, 8 * LEAST_INFLIGHT_BYTES)
    # A quarter for each side's values, one for the readers and one for the comparison.
    quarter = max_inflight_bytes // 4
    report = DiffReport(os.fspath(a), os.fspath(b), atol is not None or rtol is not None)
    sides: list[StoredTensors] = []
    try:
        for path in (a, b):
            sides.append(StoredTensors(path, quarter))
        report.a, report.b = (side.path for side in sides)
        chosen = None
        if names is not None:
            present = {name for side in sides for name in side.names}
            chosen = set(select_names(present, list(names), f"{report.a} and {report.b}"))
        _Comparison(sides[0], sides[1], report, atol or 0.0, rtol or 0.0, quarter).run(
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
    """The differences found so far in one tensor."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    differing: int = 0
    outside: int = 0
    absolute: float | int = -1
    relative: float = -1.0
    index: tuple[int, ...] | None = None
    bits_differ: bool = False
    only_bytes: bool = False  # some bytes differ, and torch cannot convert the dtype to numbers


class _Comparison:
    def __init__(
        self,
        a: StoredTensors,
        b: StoredTensors,
        report: DiffReport,
        atol: float,
        rtol: float,
        bytes_per_side: int,
    ) -> None:
        self._a, self._b, self._report = a, b, report
        self._atol, self._rtol = atol, rtol
        self._bytes_per_side = bytes_per_side
        # Boxes to read together; the tensors receive the values from a and from b.
        self._batch: list[tuple[_Tally, Box, torch.Tensor, torch.Tensor]] = []
        self._batch_bytes = 0

    def run(self, progress: ProgressOption, chosen: set[str] | None) -> None:
        """Compares the chosen names, or all names if ``chosen`` is None."""
        report = self._report
        of_a, of_b = (
            [name for name in side.names if chosen is None or name in chosen]
            for side in (self._a, self._b)
        )
        report.only_in_a = [name for name in of_a if name not in self._b]
        report.only_in_b = [name for name in of_b if name not in self._a]
        tensors: list[_Tally] = []
        quantized: list[str] = []
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
                    quantized.append(name)
        self._compare_all(tensors, total, progress)
        for name in quantized:
            self._compare_quantized(name)
        for name in objects:
            if self._has_equal_bytes(name, self._a.records(name)[0], self._b.records(name)[0]):
                report.same += 1
            else:
                report.objects.append(name)

    def _compare_all(self, tallies: list[_Tally], total: int, progress: ProgressOption) -> None:
        with reporting(progress, "compare", None, total) as shown:
            done = 0

            def advance() -> None:
                nonlocal done
                done += self._batch_bytes
                self._run_batch()
                if shown is not None:
                    shown(Progress(total, 0, done))

            for tally in tallies:
                dtypes = tally.dtypes
                widest = max(dtype.itemsize for dtype in dtypes)
                for box in split_into_boxes(tally.shape, max(1, self._bytes_per_side // widest)):
                    count = math.prod(box[1])
                    held = count * sum(dtype.itemsize for dtype in dtypes)
                    if self._batch and self._batch_bytes + held > 2 * self._bytes_per_side:
                        advance()
                    a, b = (empty_tensor(box[1], dtype) for dtype in dtypes)
                    self._batch.append((tally, box, a, b))
                    self._batch_bytes += held
            advance()
        for tally in tallies:
            self._report_tensor(tally)

    def _run_batch(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        for side, which in ((self._a, 2), (self._b, 3)):
            reads = _C.TensorReads()
            for entry in batch:
                side.add_reads(reads, entry[0].name, entry[1], cast(torch.Tensor, entry[which]))
            if len(reads):
                side.reader.read_tensors(reads)
        for tally, box, a, b in batch:
            self._compare(tally, box, a.reshape(-1), b.reshape(-1))

    def _compare(self, tally: _Tally, box: Box, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype == b.dtype:
            if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                return
            tally.bits_differ = True
        for begin in range(0, a.numel(), _ELEMENTS_PER_PASS):
            part_a, part_b = (t[begin : begin + _ELEMENTS_PER_PASS] for t in (a, b))
            try:
                found = _find_differences(part_a, part_b)
            except (NotImplementedError, RuntimeError):
                # torch cannot convert this dtype to numbers.
                same = a.dtype == b.dtype and torch.equal(
                    part_a.view(torch.uint8), part_b.view(torch.uint8)
                )
                tally.only_bytes = tally.only_bytes or not same
                continue
            if found is None:
                continue
            self._add_to_tally(tally, box, begin, found)

    def _add_to_tally(self, tally: _Tally, box: Box, begin: int, found: _Differences) -> None:
        allowed = self._atol + self._rtol * found.magnitude_b
        outside = ~(found.absolute <= allowed) | found.absolute.isinf()
        tally.differing += found.positions.numel()
        tally.outside += int(outside.sum())
        relative = found.absolute / torch.maximum(found.magnitude_a, found.magnitude_b)
        relative = relative.nan_to_num(nan=math.inf, posinf=math.inf)
        tally.relative = max(tally.relative, float(relative.max()))
        largest = found.exact_distance(int(found.absolute.argmax()))
        if largest > tally.absolute:
            tally.absolute = largest
            position = begin + int(found.positions[found.absolute.argmax()])
            tally.index = _index_in_tensor(position, box)

    def _report_tensor(self, tally: _Tally) -> None:
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

    def _compare_quantized(self, name: str) -> None:
        """Compares the stored bytes of the shards; differently sharded tensors count as different.

        The values cannot be compared: only torch.load can decode them.
        """
        a, b = self._a.tensor(name), self._b.tensor(name)
        assert a is not None
        assert b is not None
        in_a = {(record.offsets, record.sizes): record for record in self._a.records(name)}
        in_b = {(record.offsets, record.sizes): record for record in self._b.records(name)}
        if (
            a.dtype == b.dtype
            and in_a.keys() == in_b.keys()
            and all(self._has_equal_bytes(name, in_a[shard], in_b[shard]) for shard in in_a)
        ):
            self._report.same += 1
            return
        shape = a.shape
        self._report.tensors.append(
            TensorDifference(name, shape, math.prod(shape), None, 1, None, None, None)
        )

    def _has_equal_bytes(self, name: str, in_a: Record, in_b: Record) -> bool:
        if in_a.length != in_b.length:
            return False
        return all(
            a == b
            for a, b in zip(
                self._a.read_chunks(name, in_a, self._bytes_per_side),
                self._b.read_chunks(name, in_b, self._bytes_per_side),
                strict=True,
            )
        )


@dataclass
class _Differences:
    """The differing elements of one pass.

    Attributes:
        positions: flat positions.
        a, b: values in each checkpoint; exact for integers.
        absolute: absolute differences; rounded to float64 for integers.
        magnitude_a, magnitude_b: absolute values of a and b.
    """

    positions: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    absolute: torch.Tensor
    magnitude_a: torch.Tensor
    magnitude_b: torch.Tensor

    def exact_distance(self, which: int) -> float | int:
        """Returns the absolute difference of one element; exact for integers."""
        if self.a.dtype.is_floating_point or self.b.dtype.is_floating_point:
            return float(self.absolute[which])
        if self.a.is_complex() or self.b.is_complex():
            return float(self.absolute[which])
        return abs(int(self.a[which].item()) - int(self.b[which].item()))


def _find_differences(a: torch.Tensor, b: torch.Tensor) -> _Differences | None:
    """Finds the elements whose values differ; None if there are none. NaN equals NaN."""
    if not any(t.is_floating_point() or t.is_complex() for t in (a, b)):
        positions = _differing_integers(a, b).nonzero().reshape(-1)
        if positions.numel() == 0:
            return None
        a, b = _select_integers(a, positions), _select_integers(b, positions)
        float_a, float_b = as_float64(a), as_float64(b)
        distance = _integer_distance(a, b, float_a, float_b)
        return _Differences(positions, a, b, distance, float_a.abs(), float_b.abs())
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    wide_a, wide_b = widen(a, wide), widen(b, wide)
    positions = (~_equal_or_both_nan(wide_a, wide_b)).nonzero().reshape(-1)
    if positions.numel() == 0:
        return None
    wide_a, wide_b = wide_a[positions], wide_b[positions]
    absolute = (wide_a - wide_b).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return _Differences(positions, wide_a, wide_b, absolute, wide_a.abs(), wide_b.abs())


def _equal_or_both_nan(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_complex():
        # For complex numbers, isnan() does not distinguish which part is NaN.
        return _equal_or_both_nan(torch.view_as_real(a), torch.view_as_real(b)).all(dim=-1)
    return (a == b) | (a.isnan() & b.isnan())


def _select_integers(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns values[positions], which torch does not implement for unsigned integers."""
    if values.dtype == torch.uint64:
        return values.view(torch.int64)[positions].view(torch.uint64)
    return values.to(torch.int64)[positions]


def _differing_integers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if (a.dtype == torch.uint64) == (b.dtype == torch.uint64):
        return as_int64(a) != as_int64(b)
    # Only one dtype is uint64, so a value that is negative as int64 is out of range for one dtype.
    return (as_int64(a) != as_int64(b)) | (as_int64(a) < 0) | (as_int64(b) < 0)


def _integer_distance(
    a: torch.Tensor, b: torch.Tensor, float_a: torch.Tensor, float_b: torch.Tensor
) -> torch.Tensor:
    """Returns |a - b| in float64.

    Subtracts before rounding if possible, because large adjacent integers are equal in float64.
    """
    bits_a, bits_b = as_int64(a), as_int64(b)
    if (a.dtype == torch.uint64) != (b.dtype == torch.uint64):
        return (float_a - float_b).abs()
    sign_bit = _LEAST_INT64 if a.dtype == torch.uint64 else 0
    larger = (bits_a ^ sign_bit) > (bits_b ^ sign_bit)
    # The subtraction wraps modulo 2^64, but the distance is less than 2^64.
    distance = torch.where(larger, bits_a - bits_b, bits_b - bits_a)
    return as_float64(distance.view(torch.uint64))


def _index_in_tensor(position: int, box: Box) -> tuple[int, ...]:
    """Converts a flat position within a box into an index of the tensor."""
    index = []
    for offset, length in zip(reversed(box[0]), reversed(box[1]), strict=True):
        position, at = divmod(position, length)
        index.append(offset + at)
    return tuple(reversed(index))
