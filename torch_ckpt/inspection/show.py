"""``show``: what the tensors and objects of a checkpoint hold, and where it lies.

1. The names are chosen by the metadata.
2. A tensor is read in boxes, as ``diff`` reads it; what is told of its values is put together from
   these: mean and standard deviation as of Chan, Golub and LeVeque, "Updating Formulae and a
   Pairwise Algorithm for Computing Sample Variances" (1979).
3. An object is told as Python writes it. It is of harmless types, or not unpickled.
"""

from __future__ import annotations

import json
import math
import os
import pprint
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from torch_ckpt._base.formatting import plural, printable, sentence, size
from torch_ckpt._base.progress import Progress, ProgressOption, Reporter
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe
from torch_ckpt.inspection.listing import matching
from torch_ckpt.inspection.stored_tensors import (
    QUANTIZED,
    Box,
    StoredTensor,
    StoredTensors,
    as_float64,
    as_int64,
    boxes,
    empty,
    widened,
)
from torch_ckpt.inspection.verify import is_damage

# Bytes of a tensor that are held at once. Its numbers in float64, and what is computed of them,
# may be sixteen times as many.
_AT_ONCE = 4 << 20

_INFLIGHT_BYTES = 64 << 20

# Lines of an object's text.
_MOST_LINES = 40

_LEAST_INT64 = -(1 << 63)


@dataclass(frozen=True)
class Place:
    """Where a shard or an object is stored.

    Attributes:
        file: relative to the checkpoint's directory.
        offset: in bytes, in the file.
        bytes: that it takes there, with its envelope.
        offsets: of a shard, in the whole tensor, by dimension; None of an object.
        sizes: of a shard, likewise.
    """

    file: str
    offset: int
    bytes: int
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None

    def __str__(self) -> str:
        place = f"{printable(self.file)} at {self.offset}, {size(self.bytes)}"
        if self.offsets is None or self.sizes is None:
            return place
        ends = zip(self.offsets, self.sizes, strict=True)
        return f"[{', '.join(f'{begin}:{begin + n}' for begin, n in ends)}] {place}"


@dataclass(frozen=True)
class Statistics:
    """What the values of a tensor are like; of complex numbers, their magnitudes.

    Attributes:
        min, max: of the finite ones; exact for integers. None where there are none.
        mean: of the finite ones.
        std: of the finite ones, as of a whole population.
        zeros, nans, infinities: how many there are.
    """

    min: float | int | None
    max: float | int | None
    mean: float | None
    std: float | None
    zeros: int
    nans: int
    infinities: int

    def __str__(self) -> str:
        if self.min is None or self.max is None:
            parts = ["no finite value"]
        else:
            parts = [
                f"min {self.min:.6g}" if isinstance(self.min, float) else f"min {self.min}",
                f"max {self.max:.6g}" if isinstance(self.max, float) else f"max {self.max}",
                f"mean {self.mean:.6g}",
                f"std {self.std:.6g}",
            ]
        counts = ((self.zeros, "zero"), (self.nans, "NaN"), (self.infinities, "infinite value"))
        return ", ".join(parts + [plural(count, noun) for count, noun in counts if count])


@dataclass(frozen=True)
class ShownTensor:
    """A tensor of a checkpoint.

    Attributes:
        name: fully qualified.
        dtype: as "float32".
        shape: of the whole tensor.
        bytes: of the whole tensor.
        places: of its shards.
        statistics: None where torch cannot make numbers of this dtype, or there is no element.
        first: the first values, in row-major order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    places: list[Place]
    statistics: Statistics | None
    first: list[Any]

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{printable(self.name)}: {self.dtype} {list(self.shape)}, {size(self.bytes)}"
        if self.statistics is not None:
            yield f"  {self.statistics}"
        if self.first:
            more = ", ..." if len(self.first) < math.prod(self.shape) else ""
            values = (f"{v:.6g}" if isinstance(v, float | complex) else str(v) for v in self.first)
            yield f"  values {', '.join(values)}{more}"
        for place in self.places:
            yield f"  {place}"


@dataclass(frozen=True)
class ShownObject:
    """An object of a checkpoint.

    Attributes:
        name: fully qualified.
        place: where it is stored.
        value: the object; None where ``refused`` says why it is not unpickled.
        refused: empty where it is.
    """

    name: str
    place: Place
    value: Any
    refused: str = ""

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{printable(self.name)}: an object, {size(self.place.bytes)}"
        text = self.refused or _text_of(self.value)
        lines = text.splitlines() or [""]
        for line in lines[:_MOST_LINES]:
            yield f"  {printable(line)}"
        if len(lines) > _MOST_LINES:
            yield f"  and {plural(len(lines) - _MOST_LINES, 'more line')}"
        yield f"  {self.place}"


@dataclass(frozen=True)
class ShowReport:
    """What ``show`` tells of a checkpoint.

    Attributes:
        checkpoint: its directory.
        items: those that are sound, by name, numbers in names by their value.
        damaged: (name, what) of those that cannot be read, in the same order.
    """

    checkpoint: str
    items: list[ShownTensor | ShownObject]
    damaged: list[tuple[str, str]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing of what was to be shown is damaged."""
        return not self.damaged

    def lines(self) -> Iterator[str]:
        """For people."""
        for item in self.items:
            yield from item.lines()
        for name, what in self.damaged:
            yield printable(f"damaged: {name}: {what}")

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def document(self) -> dict[str, Any]:
        """All of it, for JSON: what that does not have is a string there."""
        return {
            "checkpoint": self.checkpoint,
            "items": [
                _of_tensor(item) if isinstance(item, ShownTensor) else _of_object(item)
                for item in self.items
            ],
            "damaged": [{"name": name, "what": what} for name, what in self.damaged],
        }


def show(
    path: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    *,
    first: int = 6,
    allow_pickle: bool = False,
    progress: ProgressOption = None,
) -> ShowReport:
    """Reads tensors and objects of a checkpoint, of stock torch or of ours, in any sharding.

    Takes some 64 MiB beside its report, and what an object has.

    Args:
        path: of the checkpoint's directory; or ``ROOT/40`` for step 40 of a run, or ROOT for its
            newest step.
        names: fully qualified ones, also without their last parts ("model" for all of "model.*"),
            or patterns as of :mod:`fnmatch`; all if None.
        first: how many values of each tensor are told.
        allow_pickle: unpickle objects of whatever type, which may run code.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.

    Returns:
        What is sound, verified as by a load, and the names of what is damaged.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        CheckpointError: no name is like one of the patterns.
        Unsafe, Corrupt: its metadata cannot be read.
        OSError: a system call failed for a reason of the machine, such as a lack of descriptors.
        ValueError: an option is out of range.
    """
    if isinstance(names, str):
        raise ValueError(f"names must be a list of patterns, got the string {names!r}")
    if first < 0:
        raise ValueError(f"first must not be negative, got {first}")
    stored = StoredTensors(path, _INFLIGHT_BYTES, allow_pickle)
    try:
        chosen = matching(stored.names, None if names is None else list(names), stored.path)
        sizes = {name: stored.bytes_of(name) for name in chosen}
        total, done = sum(sizes.values()), 0
        report = ShowReport(stored.path, [])
        with Reporter(progress, "show", None, total) as shown:
            for name in chosen:
                try:
                    report.items.append(_shown(stored, name, first))
                except (Corrupt, Unsafe, OSError) as error:
                    if isinstance(error, OSError) and not is_damage(error.errno or 0):
                        raise
                    report.damaged.append((name, sentence(error)))
                done += sizes[name]
                if shown.active:
                    shown.update(Progress(total, 0, done))
        return report
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read in parts: {error}") from error
    finally:
        stored.reader.release()


def _shown(stored: StoredTensors, name: str, first: int) -> ShownTensor | ShownObject:
    entry = stored.tensor(name)
    if entry is None:
        return _shown_object(stored, name)
    return _shown_tensor(stored, name, entry, first)


def _shown_object(stored: StoredTensors, name: str) -> ShownObject:
    (record,) = stored.places(name)
    place = Place(record.file, record.offset, record.length)
    try:
        return ShownObject(name, place, stored.object(name))
    except Unsafe as error:
        return ShownObject(name, place, None, f"not unpickled: {error}")


def _shown_tensor(stored: StoredTensors, name: str, entry: StoredTensor, first: int) -> ShownTensor:
    dtype, shape = entry
    # Their fields are in the same order.
    places = [Place(*record) for record in stored.places(name)]
    statistics: Statistics | None = None
    values: list[Any] = []
    # Of those torch only knows to read all, with their scales.
    if dtype not in QUANTIZED:
        statistics, values = _looked_at(stored, name, shape, dtype, first)
    title = str(dtype).removeprefix("torch.")
    return ShownTensor(name, title, shape, stored.bytes_of(name), places, statistics, values)


def _looked_at(
    stored: StoredTensors, name: str, shape: tuple[int, ...], dtype: torch.dtype, first: int
) -> tuple[Statistics | None, list[Any]]:
    tally = _Tally()
    values: list[Any] = []
    for box in boxes(shape, _AT_ONCE // dtype.itemsize):
        part = _read(stored, name, box, dtype)
        try:
            tally.add(part)
            # Boxes come in row-major order.
            values += _numbers(part[: first - len(values)])
        except (NotImplementedError, RuntimeError):
            # No conversion of this dtype.
            return None, []
    return tally.statistics(), values


def _read(stored: StoredTensors, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """In one dimension."""
    target = empty(box[1], dtype)
    files: dict[str, int] = {}
    rows = stored.rows(name, box, target, files)
    if rows:
        stored.reader.read_rows(list(files), rows)
    return target.reshape(-1)


class _Tally:
    """What has been seen of a tensor so far."""

    def __init__(self) -> None:
        self._elements = 0
        self._finite = 0
        self._zeros = 0
        self._nans = 0
        self._mean = 0.0
        self._squares = 0.0  # of what the finite ones differ from their mean by
        self._least: float | int = math.inf
        self._largest: float | int = -math.inf

    def add(self, part: torch.Tensor) -> None:
        """A tensor in one dimension, with an element at least."""
        is_exact = not (part.is_floating_point() or part.is_complex())
        wide = widened(part, torch.complex128).abs() if part.is_complex() else as_float64(part)
        finite = wide if is_exact else wide[wide.isfinite()]
        self._elements += part.numel()
        self._zeros += int((wide == 0).sum())
        self._nans += int(wide.isnan().sum())
        count = finite.numel()
        if count == 0:
            return
        ends = _ends(part) if is_exact else [float(x) for x in torch.aminmax(finite)]
        self._least, self._largest = min(self._least, ends[0]), max(self._largest, ends[1])
        mean = float(finite.mean())
        squares = float((finite - mean).square().sum())
        together = self._finite + count
        apart = mean - self._mean
        self._squares += squares + apart * apart * self._finite * count / together
        self._mean += apart * count / together
        self._finite = together

    def statistics(self) -> Statistics | None:
        """Of all of it; None where there was no element."""
        if self._elements == 0:
            return None
        infinities = self._elements - self._finite - self._nans
        if self._finite == 0:
            return Statistics(None, None, None, None, self._zeros, self._nans, infinities)
        return Statistics(
            self._least,
            self._largest,
            self._mean,
            math.sqrt(self._squares / self._finite),
            self._zeros,
            self._nans,
            infinities,
        )


def _ends(part: torch.Tensor) -> list[int]:
    """The least and the largest of integers."""
    numbers = as_int64(part)
    if part.dtype != torch.uint64:
        return [int(x) for x in torch.aminmax(numbers)]
    # Their order as int64 is that of uint64 when the sign is turned over.
    return [int(x) - _LEAST_INT64 for x in torch.aminmax(numbers ^ _LEAST_INT64)]


def _numbers(part: torch.Tensor) -> list[Any]:
    if part.dtype == torch.bool or part.dtype == torch.uint64:
        return part.tolist()
    if part.is_complex():
        return part.to(torch.complex128).tolist()
    return part.to(torch.float64 if part.is_floating_point() else torch.int64).tolist()


def _text_of(value: Any) -> str:
    try:
        return pprint.pformat(value, width=98)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply to be written"


def _of_tensor(item: ShownTensor) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        is_number = isinstance(value, float) and math.isfinite(value)
        return value if is_number or isinstance(value, int | None) else str(value)

    document = asdict(item) | {"kind": "tensor", "first": [plain(value) for value in item.first]}
    if item.statistics is not None:
        document["statistics"] = {k: plain(v) for k, v in asdict(item.statistics).items()}
    return document


def _of_object(item: ShownObject) -> dict[str, Any]:
    document: dict[str, Any] = {
        "kind": "object",
        "name": item.name,
        "place": asdict(item.place),
    }
    if item.refused:
        return document | {"refused": item.refused}
    try:
        # A dict with other keys than strings would come back as another one.
        if json.loads(json.dumps(item.value, allow_nan=False)) == item.value:
            return document | {"value": item.value}
    except (ValueError, TypeError, RecursionError, RuntimeError):
        pass
    return document | {"text": _text_of(item.value)}
