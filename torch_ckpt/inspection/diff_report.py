"""What differs between two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_ckpt._base.formatting import plural, printable


@dataclass(frozen=True)
class TensorDifference:
    """How the values of two tensors of one shape differ.

    Attributes:
        name: fully qualified.
        shape: of both.
        elements: in all.
        differing: elements of different values, where NaN equals NaN; None: not known, since torch
            can only say of this dtype that the bytes differ.
        outside: those of them that are further apart than the tolerances allow.
        largest_absolute: the largest difference, exact for integers; infinite where one of the two
            is NaN or infinite.
        largest_relative: the largest difference, relative to the larger of both magnitudes.
        index: of the element with the largest absolute difference.
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
        largest = self.largest_absolute
        return (
            f"{text}; at most by {largest if isinstance(largest, int) else f'{largest:.6g}'} "
            f"at {list(self.index or ())}, relatively by {self.largest_relative:.6g}"
        )


@dataclass
class DiffReport:
    """What :func:`diff` found.

    Attributes:
        a, b: the directories.
        tolerant: whether tolerances were given.
        same: how many names have equal values.
        only_in_a, only_in_b: names that the other one does not have.
        kinds: (name, in a, in b) of what is a tensor in one and an object in the other.
        shapes: (name, in a, in b) of tensors of different shapes.
        dtypes: (name, in a, in b) of tensors of different dtypes, whose values are compared too.
        tensors: those whose values differ.
        bits: names of tensors of the same dtype and equal values that differ in bits, which are
            signs of zeros and payloads of NaNs.
        objects: names of objects whose stored bytes differ.
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
        """Whether names, shapes and values are the same, and dtypes unless tolerances were given;
        values within these."""
        differ = self.only_in_a or self.only_in_b or self.kinds or self.shapes or self.objects
        beyond = any(tensor.outside for tensor in self.tensors)
        return not (differ or beyond or (self.dtypes and not self.tolerant))

    def lines(self) -> Iterator[str]:
        """The whole report for people, with escaped names; the last line is the verdict."""
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
            yield printable(f"bits: {name}: equal values; signs of zeros or bits of NaNs differ")
        for name in self.objects:
            yield printable(f"object: {name}: the stored bytes differ")
        within = " within the tolerances" if self.tolerant else ""
        verdict = f"equal{within}" if self.equal else f"different{within and ' beyond tolerances'}"
        yield printable(
            f"{self.a} and {self.b} are {verdict}: {plural(self.same, 'name')} with equal values"
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def document(self) -> dict[str, Any]:
        """All of it, for JSON, which has no infinity: that is a string there."""

        def number(value: float | int | None) -> float | int | str | None:
            return str(value) if isinstance(value, float) and not math.isfinite(value) else value

        def pairs(entries: list[Any]) -> list[dict[str, Any]]:
            return [{"name": name, "a": a, "b": b} for name, a, b in entries]

        return {
            "a": self.a,
            "b": self.b,
            "equal": self.equal,
            "same": self.same,
            "only_in_a": self.only_in_a,
            "only_in_b": self.only_in_b,
            "kinds": pairs(self.kinds),
            "shapes": pairs(self.shapes),
            "dtypes": pairs(self.dtypes),
            "tensors": [
                {
                    key: number(value) if isinstance(value, float) else value
                    for key, value in asdict(tensor).items()
                }
                for tensor in self.tensors
            ],
            "bits": self.bits,
            "objects": self.objects,
        }
