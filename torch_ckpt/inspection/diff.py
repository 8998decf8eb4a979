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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from torch_ckpt._base.checks import require_at_least
from torch_ckpt._base.progress import Progress, ProgressOption, reporting
from torch_ckpt.checkpoint.opened import Box, Checkpoint, Record, split_into_boxes
from torch_ckpt.checkpoint.reading import in_waves
from torch_ckpt.errors import CheckpointError
from torch_ckpt.inspection.diff_report import DiffReport, TensorDifference
from torch_ckpt.inspection.elements import QUANTIZED, as_float64, as_int64, widen
from torch_ckpt.inspection.listing import select_names
from torch_ckpt.options import LEAST_INFLIGHT_BYTES, ReadOptions

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
    storage_options: Mapping[str, Any] | None = None,
) -> DiffReport:
    """Compares two checkpoints written by torch_ckpt or stock torch. Each can have any sharding.

    Args:
        a, b: checkpoint directories. If a run is saved in ROOT, pass ``ROOT/40`` for step 40, or
            ``ROOT`` for the newest step. Can also be safetensors files, or directories of
            safetensors files, or URLs of any of these.
        names: names, prefixes ("model" selects "model.*") or :mod:`fnmatch` patterns to compare;
            None compares everything.
        atol, rtol: values are equal if ``|a - b| <= atol + rtol * |b|``; both default to 0. If
            either is given, tensors that differ only in dtype also count as equal.
        max_inflight_bytes: memory limit in bytes, not counting the metadata.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.
        storage_options: see :class:`torch_ckpt.ReadOptions`; for both checkpoints.

    Returns:
        All differences; ``report.equal`` is True if there are none.

    Raises:
        FileNotFoundError: one of the directories has no committed checkpoint.
        Unsafe, Corrupt: a checkpoint cannot be read, or a record fails its checksum.
        OSError: a system call failed.
        CheckpointError: one of ``names`` matches nothing in either checkpoint.
        ValueError: an option is out of range.

    Example::

        report = diff("run/40", "run/80", ["model"], atol=1e-6)
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
    options = ReadOptions(max_inflight_bytes=quarter, storage_options=storage_options)
    with ExitStack() as stack:
        try:
            one, other = (stack.enter_context(Checkpoint(path, options=options)) for path in (a, b))
            is_tolerant = atol is not None or rtol is not None
            report = DiffReport(one.location, other.location, is_tolerant)
            chosen = None
            if names is not None:
                present = {*one.names, *other.names}
                chosen = set(select_names(present, list(names), f"{report.a} and {report.b}"))
            comparison = _Comparison(one, other, report, atol or 0.0, rtol or 0.0, quarter)
            comparison.run(progress, chosen)
        except ValueError as error:
            raise CheckpointError(f"{a} and {b} cannot be compared: {error}") from error
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

    @property
    def element_bytes(self) -> int:
        """Size of an element in both checkpoints together."""
        return sum(dtype.itemsize for dtype in self.dtypes)


@dataclass
class _Comparison:
    a: Checkpoint
    b: Checkpoint
    report: DiffReport
    atol: float
    rtol: float
    bytes_per_side: int

    def run(self, progress: ProgressOption, chosen: set[str] | None) -> None:
        """Compares the chosen names, or all names if ``chosen`` is None."""
        report = self.report
        of_a, of_b = (
            [name for name in side.names if chosen is None or name in chosen]
            for side in (self.a, self.b)
        )
        report.only_in_a = [name for name in of_a if name not in self.b]
        report.only_in_b = [name for name in of_b if name not in self.a]
        tensors: list[_Tally] = []
        stored: list[str] = []  # names whose stored bytes are compared
        for name in of_a:
            if name not in self.b:
                continue
            a, b = self.a.tensor(name), self.b.tensor(name)
            if a is None or b is None:
                if a is b:
                    stored.append(name)
                else:
                    in_a, in_b = ("an object" if side is None else "a tensor" for side in (a, b))
                    report.kinds.append((name, in_a, in_b))
            elif a.shape != b.shape:
                report.shapes.append((name, a.shape, b.shape))
            else:
                dtypes = a.dtype, b.dtype
                if a.dtype != b.dtype:
                    in_a, in_b = (str(dtype).removeprefix("torch.") for dtype in dtypes)
                    report.dtypes.append((name, in_a, in_b))
                if QUANTIZED.isdisjoint(dtypes):
                    tensors.append(_Tally(name, a.shape, dtypes))
                else:
                    stored.append(name)
        self._compare_values(tensors, progress)
        for tally in tensors:
            self._report_tensor(tally)
        for name in stored:
            tensor = self.a.tensor(name)
            if self._has_equal_records(name):
                report.same += 1
            elif tensor is None:
                report.objects.append(name)
            else:
                report.tensors.append(_differs_in_bytes(name, tensor.shape))

    def _compare_values(self, tallies: list[_Tally], progress: ProgressOption) -> None:
        total = sum(math.prod(tally.shape) * tally.element_bytes for tally in tallies)
        done = 0
        with reporting(progress, "compare", None, total) as shown:
            for wave in in_waves(self._boxes(tallies), 2 * self.bytes_per_side):
                done += self._compare_wave(wave)
                if shown is not None:
                    shown(Progress(total, 0, done))

    def _compare_wave(self, wave: list[tuple[_Tally, Box]]) -> int:
        """Reads and compares boxes. Returns the size of their values, which are freed at the
        end."""
        boxes = [(tally.name, box) for tally, box in wave]
        parts_a, parts_b = self.a.read_boxes(boxes), self.b.read_boxes(boxes)
        for (tally, box), a, b in zip(wave, parts_a, parts_b, strict=True):
            self._compare(tally, box, a.reshape(-1), b.reshape(-1))
        return sum(part.nbytes for part in (*parts_a, *parts_b))

    def _boxes(self, tallies: list[_Tally]) -> Iterator[tuple[tuple[_Tally, Box], int]]:
        """Yields boxes, with the size of their values in both checkpoints."""
        for tally in tallies:
            widest = max(dtype.itemsize for dtype in tally.dtypes)
            for box in split_into_boxes(tally.shape, max(1, self.bytes_per_side // widest)):
                yield (tally, box), math.prod(box[1]) * tally.element_bytes

    def _compare(self, tally: _Tally, box: Box, a: torch.Tensor, b: torch.Tensor) -> None:
        if _have_equal_bytes(a, b):
            return
        tally.bits_differ |= a.dtype == b.dtype
        for begin in range(0, a.numel(), _ELEMENTS_PER_PASS):
            part_a, part_b = (t[begin : begin + _ELEMENTS_PER_PASS] for t in (a, b))
            try:
                self._count_differences(tally, box, begin, part_a, part_b)
            except (NotImplementedError, RuntimeError):
                # torch cannot convert this dtype to numbers.
                tally.only_bytes |= not _have_equal_bytes(part_a, part_b)

    def _count_differences(
        self, tally: _Tally, box: Box, begin: int, a: torch.Tensor, b: torch.Tensor
    ) -> None:
        """Adds the elements whose values differ to the tally. NaN equals NaN."""
        is_exact = not any(t.is_floating_point() or t.is_complex() for t in (a, b))
        if is_exact:
            positions = _differing_integers(a, b).nonzero().reshape(-1)
            a, b = _select_integers(a, positions), _select_integers(b, positions)
            wide_a, wide_b = as_float64(a), as_float64(b)
            absolute = _integer_distance(a, b, wide_a, wide_b)
        else:
            wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
            wide_a, wide_b = widen(a, wide), widen(b, wide)
            positions = (~_equal_or_both_nan(wide_a, wide_b)).nonzero().reshape(-1)
            wide_a, wide_b = wide_a[positions], wide_b[positions]
            absolute = (wide_a - wide_b).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        if positions.numel() == 0:
            return
        magnitude_a, magnitude_b = wide_a.abs(), wide_b.abs()
        allowed = self.atol + self.rtol * magnitude_b
        tally.differing += positions.numel()
        tally.outside += int((~(absolute <= allowed) | absolute.isinf()).sum())
        relative = absolute / torch.maximum(magnitude_a, magnitude_b)
        relative = relative.nan_to_num(nan=math.inf, posinf=math.inf)
        tally.relative = max(tally.relative, float(relative.max()))
        at = int(absolute.argmax())
        largest: float | int = float(absolute[at])
        if is_exact:
            largest = abs(int(a[at].item()) - int(b[at].item()))
        if largest > tally.absolute:
            tally.absolute = largest
            tally.index = _index_in_tensor(begin + int(positions[at]), box)

    def _report_tensor(self, tally: _Tally) -> None:
        report = self.report
        if tally.only_bytes:
            report.tensors.append(_differs_in_bytes(tally.name, tally.shape))
        elif tally.differing:
            report.tensors.append(
                TensorDifference(
                    tally.name,
                    tally.shape,
                    math.prod(tally.shape),
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

    def _has_equal_records(self, name: str) -> bool:
        """Compares the stored bytes of an object, or of the shards of a quantized tensor.

        Only torch.load can decode quantized values. Differently sharded tensors count as different.
        """
        a, b = (
            {(record.offsets, record.sizes): record for record in side.records(name)}
            for side in (self.a, self.b)
        )
        return (
            self.a.tensor(name) == self.b.tensor(name)
            and a.keys() == b.keys()
            and all(self._has_equal_bytes(name, a[shard], b[shard]) for shard in a)
        )

    def _has_equal_bytes(self, name: str, in_a: Record, in_b: Record) -> bool:
        return in_a.length == in_b.length and all(
            a == b
            for a, b in zip(
                self.a.read_chunks(name, in_a, self.bytes_per_side),
                self.b.read_chunks(name, in_b, self.bytes_per_side),
                strict=True,
            )
        )


def _differs_in_bytes(name: str, shape: tuple[int, ...]) -> TensorDifference:
    return TensorDifference(name, shape, math.prod(shape), None, 1, None, None, None)


def _have_equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _equal_or_both_nan(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_complex():
        # For complex numbers, isnan() does not distinguish which part is NaN.
        return _equal_or_both_nan(torch.view_as_real(a), torch.view_as_real(b)).all(dim=-1)
    return (a == b) | (a.isnan() & b.isnan())


def _select_integers(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns values[positions], which torch does not implement for unsigned integers."""
    chosen = as_int64(values)[positions]
    return chosen.view(torch.uint64) if values.dtype == torch.uint64 else chosen


def _differing_integers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    bits_a, bits_b = as_int64(a), as_int64(b)
    if (a.dtype == torch.uint64) == (b.dtype == torch.uint64):
        return bits_a != bits_b
    # Only one dtype is uint64, so a value that is negative as int64 is out of range for one dtype.
    return (bits_a != bits_b) | (bits_a < 0) | (bits_b < 0)


def _integer_distance(
    a: torch.Tensor, b: torch.Tensor, float_a: torch.Tensor, float_b: torch.Tensor
) -> torch.Tensor:
    """Returns |a - b| in float64.

    Subtracts before rounding if possible, because large adjacent integers are equal in float64.
    """
    if (a.dtype == torch.uint64) != (b.dtype == torch.uint64):
        return (float_a - float_b).abs()
    bits_a, bits_b = as_int64(a), as_int64(b)
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
