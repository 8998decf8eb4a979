"""The report of ``diff``: differences between two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_ckpt._base.formatting import Report, plural, printable


@dataclass(frozen=True)
class TensorDifference:
    """Difference between the values of a tensor that has the same shape in both checkpoints.

    Attributes:
        name: fully qualified name.
        shape: shape in both checkpoints.
        elements: number of elements.
        differing: number of elements whose values differ; NaN equals NaN. None if torch cannot
            convert the dtype to numbers; in that case, only the stored bytes were compared.
        outside: number of differing elements beyond the tolerances.
        largest_absolute: largest absolute difference; exact for integers. Infinite if one of the
            two values is NaN or infinite. None if ``differing`` is None.
        largest_relative: largest relative difference, that is, the difference divided by the larger
            of the two absolute values. None if ``differing`` is None.
        index: index of the element with the largest absolute difference. None if ``differing`` is
            None.

    Example::

        for difference in diff("run/40", "run/80").tensors:
            print(difference.name, difference.index, difference.largest_absolute)
    """

    name: str
    shape: tuple[int, ...]
    elements: int
    differing: int | None
    outside: int
    largest_absolute: float | int | None
    largest_relative: float | None
    index: tuple[int, ...] | None

    def __str__(self) -> str:
        if self.differing is None:
            return f"{self.name}: the stored bytes differ"
        text = f"{self.name}: {self.differing} of {plural(self.elements, 'element')} differ"
        if self.outside != self.differing:
            text += f", {self.outside} beyond the tolerances"
        assert self.largest_relative is not None
        absolute = self.largest_absolute
        largest = str(absolute) if isinstance(absolute, int) else f"{absolute:.6g}"
        return (
            f"{text}; largest difference {largest} "
            f"at {list(self.index or ())}, largest relative difference {self.largest_relative:.6g}"
        )


@dataclass
class DiffReport(Report):
    """Result of :func:`diff`.

    Attributes:
        a, b: the checkpoint directories.
        tolerant: True if a tolerance was given.
        same: number of names whose values are equal.
        only_in_a, only_in_b: names that the other checkpoint lacks.
        kinds: (name, kind in a, kind in b) for each name that is a tensor in one checkpoint and an
            object in the other.
        shapes: (name, shape in a, shape in b) for each tensor whose shapes differ.
        dtypes: (name, dtype in a, dtype in b) for each tensor whose dtypes differ. The values of
            these tensors are compared, too.
        tensors: tensors whose values differ.
        bits: names of tensors with equal values but different bits. Such tensors differ only in the
            signs of zeros or the payloads of NaNs.
        objects: names of objects whose stored bytes differ.

    Example::

        report = diff("run/40", "run/80")
        print("equal" if report.equal else report)
    """

    a: str
    b: str
    tolerant: bool = False
    same: int = 0
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    kinds: list[tuple[str, str, str]] = field(default_factory=list)
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    dtypes: list[tuple[str, str, str]] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    bits: list[str] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """True if names, kinds, shapes, dtypes and values are equal. If a tolerance was given,
        differences within the tolerance and differences in dtype are ignored."""
        differ = self.only_in_a or self.only_in_b or self.kinds or self.shapes or self.objects
        beyond = any(tensor.outside for tensor in self.tensors)
        return not (differ or beyond or (self.dtypes and not self.tolerant))

    def lines(self) -> Iterator[str]:
        """Yields the report as text, with escaped names; the last line is the verdict."""
        for name in self.only_in_a:
            yield printable(f"only in {self.a}: {name}")
        for name in self.only_in_b:
            yield printable(f"only in {self.b}: {name}")
        for name, a, b in self.kinds:
            yield printable(f"kind: {name}: {a} and {b}")
        for name, shape_a, shape_b in self.shapes:
            yield printable(f"shape: {name}: {list(shape_a)} and {list(shape_b)}")
        for name, a, b in self.dtypes:
            yield printable(f"dtype: {name}: {a} and {b}")
        for tensor in self.tensors:
            yield printable(f"values: {tensor}")
        for name in self.bits:
            yield printable(
                f"bits: {name}: equal values, but signs of zeros or bits of NaNs differ"
            )
        for name in self.objects:
            yield printable(f"object: {name}: the stored bytes differ")
        within = " within the tolerances" if self.tolerant else ""
        verdict = (
            f"equal{within}" if self.equal else f"different{within and ' beyond the tolerances'}"
        )
        yield printable(
            f"{self.a} and {self.b} are {verdict}: {plural(self.same, 'name')} with equal values"
        )

    def document(self) -> dict[str, Any]:
        """Returns the report as a JSON document. Infinities and NaN become strings."""
        document: dict[str, Any] = {"a": self.a, "b": self.b, "equal": self.equal} | asdict(self)
        del document["tolerant"]
        for key in ("kinds", "shapes", "dtypes"):
            document[key] = [{"name": name, "a": a, "b": b} for name, a, b in document[key]]
        for tensor in document["tensors"]:
            for key, value in tensor.items():
                if isinstance(value, float) and not math.isfinite(value):
                    tensor[key] = str(value)
        return document
