"""``show``: shows the values and locations of the tensors and objects in a checkpoint.

1. Names are selected from the metadata.
2. Tensors are read box by box, and the statistics of the boxes are combined. Mean and standard
   deviation follow Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for
   Computing Sample Variances" (1979).
3. Objects are printed with pprint. Only allow-listed types are unpickled.
"""

from __future__ import annotations

import json
import math
import os
import pprint
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from torch_ckpt._base.formatting import Report, plural, printable, sentence, size
from torch_ckpt._base.progress import Progress, ProgressOption, reporting
from torch_ckpt.checkpoint.opened import Checkpoint, split_into_boxes
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe
from torch_ckpt.inspection.elements import QUANTIZED, as_float64, as_int64, widen
from torch_ckpt.inspection.listing import is_damage, select_names
from torch_ckpt.options import ReadOptions

# Size of a box in bytes. Its values as float64 and temporaries may take 16 times as much memory.
_BOX_BYTES = 4 << 20

_INFLIGHT_BYTES = 64 << 20

# An object cannot be read in parts, and only its first lines are shown.
_MAX_OBJECT_BYTES = 64 << 20

# Maximum number of lines shown for an object.
_MAX_LINES = 40

_LEAST_INT64 = -(1 << 63)


@dataclass(frozen=True)
class Place:
    """The location of a shard or an object.

    Attributes:
        file: file name relative to the checkpoint directory.
        offset: offset in the file, in bytes.
        bytes: size of the record in bytes, including its envelope.
        offsets: offsets of the shard in the complete tensor, one per dimension; None for an object.
        sizes: sizes of the shard, one per dimension; None for an object.
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
    """Statistics of a tensor's values; for complex tensors, of their magnitudes.

    Attributes:
        min, max: extremes of the finite values; exact for integers. None if no value is finite.
        mean: mean of the finite values; None if no value is finite.
        std: population standard deviation of the finite values; None if no value is finite.
        zeros, nans, infinities: numbers of zeros, NaNs and infinite values.
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
    """A tensor in a checkpoint.

    Attributes:
        name: fully qualified name.
        dtype: name of the dtype, such as "float32".
        shape: shape of the complete tensor.
        bytes: size of the complete tensor in bytes.
        places: locations of the shards.
        statistics: statistics of the values; None if the tensor has no elements, or if torch cannot
            convert the dtype to numbers.
        first: the first values in row-major order.

    Example::

        for item in show("run/40", ["model.*"]).items:
            if isinstance(item, ShownTensor):
                print(item.name, item.shape, item.statistics)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    places: list[Place]
    statistics: Statistics | None
    first: list[Any]

    def lines(self) -> Iterator[str]:
        """Yields the tensor as lines of text."""
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
    """An object in a checkpoint.

    Attributes:
        name: fully qualified name.
        place: location of the record.
        value: the object; None if it was not read or not unpickled.
        refused: reason why the object was not read or not unpickled; empty if it was unpickled.

    Example::

        (item,) = show("run/40", ["step"]).items
        print(item.value)
    """

    name: str
    place: Place
    value: Any
    refused: str = ""

    def lines(self) -> Iterator[str]:
        """Yields the object as lines of text."""
        yield f"{printable(self.name)}: an object, {size(self.place.bytes)}"
        text = self.refused or _format_object(self.value)
        lines = text.splitlines() or [""]
        for line in lines[:_MAX_LINES]:
            yield f"  {printable(line)}"
        if len(lines) > _MAX_LINES:
            yield f"  and {plural(len(lines) - _MAX_LINES, 'more line')}"
        yield f"  {self.place}"


@dataclass(frozen=True)
class ShowReport(Report):
    """Result of :func:`show`.

    Attributes:
        checkpoint: the checkpoint directory.
        items: readable tensors and objects, in natural order of their names.
        damaged: (name, problem) for each tensor or object that cannot be read, in natural order of
            the names.

    Example::

        report = show("run/40", ["optimizer"])
        print(report)
    """

    checkpoint: str
    items: list[ShownTensor | ShownObject]
    damaged: list[tuple[str, str]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if every selected tensor and object could be read."""
        return not self.damaged

    def lines(self) -> Iterator[str]:
        """Yields the report as lines of text, with escaped names."""
        for item in self.items:
            yield from item.lines()
        for name, what in self.damaged:
            yield printable(f"damaged: {name}: {what}")

    def document(self) -> dict[str, Any]:
        """Returns the report as a JSON document. Values that JSON cannot represent become
        strings."""
        return {
            "checkpoint": self.checkpoint,
            "items": [
                _tensor_document(item) if isinstance(item, ShownTensor) else _object_document(item)
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
    storage_options: Mapping[str, Any] | None = None,
) -> ShowReport:
    """Reads tensors and objects from a checkpoint written by torch_ckpt or stock torch.

    The checkpoint can have any sharding. Reading tensors needs about 64 MiB of memory in addition
    to the report. Reading an object also needs enough memory to hold the object.

    Args:
        path: a checkpoint directory. If a run is saved in ROOT, pass ``ROOT/40`` for step 40, or
            ``ROOT`` for the newest step. Can also be a safetensors file, or a directory of
            safetensors files, or the URL of any of these.
        names: names, prefixes ("model" selects "model.*") or :mod:`fnmatch` patterns to show; None
            shows everything.
        first: number of values to show for each tensor.
        allow_pickle: unpickle objects of any type. Unpickling can run code from the checkpoint, so
            use this option only for trusted checkpoints.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.
        storage_options: see :class:`torch_ckpt.ReadOptions`.

    Returns:
        The tensors and objects, and the names of the damaged tensors and objects. Checksums are
        verified as in a load.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        CheckpointError: one of ``names`` matches nothing.
        Unsafe, Corrupt: the metadata cannot be read.
        OSError: a system call failed for a reason other than damage, such as too few file
            descriptors.
        ValueError: an option is out of range.

    Example::

        print(show("run/40", ["model.embedding.weight", "step"]))
    """
    if isinstance(names, str):
        raise ValueError(f"names must be a list of patterns, got the string {names!r}")
    if first < 0:
        raise ValueError(f"first must not be negative, got {first}")
    try:
        options = ReadOptions(
            max_inflight_bytes=_INFLIGHT_BYTES,
            allow_pickle=allow_pickle,
            storage_options=storage_options,
        )
        with Checkpoint(path, options=options) as stored:
            chosen = select_names(
                stored.names, None if names is None else list(names), stored.location
            )
            return _show(stored, chosen, first, progress)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be shown: {error}") from error


def _show(stored: Checkpoint, names: list[str], first: int, progress: ProgressOption) -> ShowReport:
    report = ShowReport(stored.location, [])
    sizes = {name: stored.tensor_bytes(name) for name in names}
    total, done = sum(sizes.values()), 0
    with reporting(progress, "show", None, total) as shown:
        for name in names:
            try:
                report.items.append(_read_item(stored, name, first))
            except (Corrupt, Unsafe, OSError) as error:
                if not is_damage(error):
                    raise
                report.damaged.append((name, sentence(error)))
            done += sizes[name]
            if shown is not None:
                shown(Progress(total, 0, done))
    return report


def _read_item(stored: Checkpoint, name: str, first: int) -> ShownTensor | ShownObject:
    tensor, records = stored.tensor(name), stored.records(name)
    if tensor is None:
        (record,) = records
        place = Place(record.file, record.offset, record.length)
        if record.length > _MAX_OBJECT_BYTES:
            text = f"the object has {size(record.length)}"
            limit = f"show reads at most {size(_MAX_OBJECT_BYTES)}"
            return ShownObject(name, place, None, f"not read: {text}, and {limit}")
        try:
            return ShownObject(name, place, stored.read_object(name))
        except Corrupt:
            raise
        except CheckpointError as error:
            # A type that is not allow-listed, or values that this machine cannot hold.
            return ShownObject(name, place, None, f"not unpickled: {error}")
    dtype, shape = tensor
    statistics: Statistics | None = None
    values: list[Any] = []
    # Quantized tensors cannot be read in boxes, because their elements need separate scales.
    if dtype not in QUANTIZED:
        statistics, values = _summarize(stored, name, shape, dtype, first)
    title = str(dtype).removeprefix("torch.")
    places = [Place(*record) for record in records]
    return ShownTensor(name, title, shape, stored.tensor_bytes(name), places, statistics, values)


def _summarize(
    stored: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype, first: int
) -> tuple[Statistics | None, list[Any]]:
    """Reads a tensor, and returns its statistics and first values."""
    tally = _Accumulator()
    values: list[Any] = []
    for box in split_into_boxes(shape, _BOX_BYTES // dtype.itemsize):
        [part] = stored.read_boxes([(name, box)])
        part = part.reshape(-1)
        try:
            tally.add(part)
            # Boxes arrive in row-major order.
            values += _numbers(part[: first - len(values)])
        except (NotImplementedError, RuntimeError):
            # torch cannot convert this dtype to numbers.
            return None, []
    return tally.statistics(), values


class _Accumulator:
    """Accumulates the statistics of a tensor."""

    def __init__(self) -> None:
        self._elements = 0
        self._finite = 0
        self._zeros = 0
        self._nans = 0
        self._mean = 0.0
        self._squares = 0.0  # sum of squared deviations of the finite values from their mean
        self._least: float | int = math.inf
        self._largest: float | int = -math.inf

    def add(self, part: torch.Tensor) -> None:
        """Adds the values of a non-empty, one-dimensional tensor."""
        is_exact = not (part.is_floating_point() or part.is_complex())
        wide = widen(part, torch.complex128).abs() if part.is_complex() else as_float64(part)
        finite = wide if is_exact else wide[wide.isfinite()]
        self._elements += part.numel()
        self._zeros += int((wide == 0).sum())
        self._nans += int(wide.isnan().sum())
        count = finite.numel()
        if count == 0:
            return
        least, largest = (
            _integer_extremes(part) if is_exact else [float(x) for x in torch.aminmax(finite)]
        )
        self._least, self._largest = min(self._least, least), max(self._largest, largest)
        mean = float(finite.mean())
        squares = float((finite - mean).square().sum())
        total = self._finite + count
        shift = mean - self._mean
        self._squares += squares + shift * shift * self._finite * count / total
        self._mean += shift * count / total
        self._finite = total

    def statistics(self) -> Statistics | None:
        """Returns the statistics of all added values; None if none were added."""
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


def _integer_extremes(part: torch.Tensor) -> list[int]:
    """Returns the smallest and the largest integer."""
    numbers = as_int64(part)
    if part.dtype != torch.uint64:
        return [int(x) for x in torch.aminmax(numbers)]
    # Flipping the sign bit maps the order of uint64 to the order of int64.
    return [int(x) - _LEAST_INT64 for x in torch.aminmax(numbers ^ _LEAST_INT64)]


def _numbers(part: torch.Tensor) -> list[Any]:
    if part.dtype == torch.bool or part.dtype == torch.uint64:
        return part.tolist()
    if part.is_complex():
        return part.to(torch.complex128).tolist()
    return part.to(torch.float64 if part.is_floating_point() else torch.int64).tolist()


def _format_object(value: Any) -> str:
    try:
        return pprint.pformat(value, width=98)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply to print"


def _tensor_document(item: ShownTensor) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        is_number = isinstance(value, float) and math.isfinite(value)
        return value if is_number or isinstance(value, int | None) else str(value)

    document = asdict(item) | {"kind": "tensor", "first": [plain(value) for value in item.first]}
    if item.statistics is not None:
        document["statistics"] = {k: plain(v) for k, v in asdict(item.statistics).items()}
    return document


def _object_document(item: ShownObject) -> dict[str, Any]:
    document: dict[str, Any] = {
        "kind": "object",
        "name": item.name,
        "place": asdict(item.place),
    }
    if item.refused:
        return document | {"refused": item.refused}
    try:
        # JSON converts dict keys to strings, so check that the value survives a round trip.
        if json.loads(json.dumps(item.value, allow_nan=False)) == item.value:
            return document | {"value": item.value}
    except (ValueError, TypeError, RecursionError, RuntimeError):
        pass
    return document | {"text": _format_object(item.value)}
