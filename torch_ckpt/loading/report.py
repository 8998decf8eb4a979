"""Reports on loads: how a state dict compares with the checkpoint, and the memory needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from torch_ckpt._base.formatting import MOST_NAMES, indented
from torch_ckpt.checkpoint.dtypes import loses_precision

#: Patterns for :mod:`fnmatch`, or a function that returns True for fully qualified names to load.
Names = Iterable[str] | Callable[[str], bool] | None


@dataclass
class LoadReport:
    """Comparison of a state dict with a checkpoint. Names are fully qualified. "Stored" refers to
    the checkpoint, "wanted" to the state dict.

    Attributes:
        loaded: names of the values that fit.
        missing: names that are missing from the checkpoint.
        unexpected: names that exist only in the checkpoint. Such names do not prevent a load.
        shapes: (name, stored, wanted) for each tensor whose shape does not fit.
        kinds: (name, stored, wanted) for each value that is a tensor in the checkpoint and an
            object in the state dict, or vice versa.
        dtypes: (name, stored, wanted) for each tensor that is converted to another dtype.
        grown: (name, stored, wanted) for each tensor that is larger than the stored tensor;
            ``zero_fill`` sets the additional elements to zero.
        absent: top-level keys whose dict or ``Stateful`` value has no value that can be loaded.
        truncated: (name, stored, wanted) for each tensor that is smaller than the stored tensor in
            at least one dimension; ``allow_shape_mismatch`` loads the common region. If the tensor
            is larger than the stored tensor in another dimension, it is also in ``grown``.
        refused: reasons why a value cannot be restored in part either, such as an optimizer of
            another class. A load fails with these reasons even with ``strict=False``.
        rename: the ``rename`` with which no name would be missing, if the names differ only by
            prefixes such as ``module.``; None if there is none.

    Examples:
        ```python
        report = torch_ckpt.load({"model": model}, "checkpoints/100", strict=False)
        for reason in report.skipped:
            print("not loaded:", reason)
        ```
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[tuple[str, torch.Size, torch.Size]] = field(default_factory=list)
    kinds: list[tuple[str, str, str]] = field(default_factory=list)
    dtypes: list[tuple[str, torch.dtype, torch.dtype]] = field(default_factory=list)
    grown: list[tuple[str, torch.Size, torch.Size]] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    truncated: list[tuple[str, torch.Size, torch.Size]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    rename: dict[str, str] | None = None

    @property
    def fits(self) -> bool:
        """True if every value of the state dict can be loaded."""
        return not (self.missing or self.shapes or self.kinds or self.refused)

    @property
    def narrowed(self) -> list[str]:
        """Names of the tensors that are converted to a dtype with less precision or range."""
        return [name for name, stored, wanted in self.dtypes if loses_precision(stored, wanted)]

    @property
    def skipped(self) -> list[str]:
        """Names of the values that a load with ``strict=False`` leaves unchanged, each with the
        reason."""
        return [
            *(f"{name} (missing)" for name in self.missing),
            *(f"{n} (stored {list(has)}, wanted {list(wants)})" for n, has, wants in self.shapes),
            *(f"{name} (stored {has}, wanted {wants})" for name, has, wants in self.kinds),
        ]

    def __str__(self) -> str:
        def sized(entries: list[tuple[str, torch.Size, torch.Size]]) -> list[str]:
            return [f"{n}: stored {list(has)}, wanted {list(wants)}" for n, has, wants in entries]

        parts = [
            ("missing from the checkpoint", self.missing),
            ("with a different shape", sized(self.shapes)),
            ("of a different kind", [f"{n}: stored {a}, wanted {b}" for n, a, b in self.kinds]),
            ("only in the checkpoint", self.unexpected),
            ("with a different dtype", [f"{n}: stored {a}, wanted {b}" for n, a, b in self.dtypes]),
            ("larger than stored", sized(self.grown)),
            ("smaller than stored", sized(self.truncated)),
        ]
        lines = [*self.refused, f"{len(self.loaded)} names fit"]
        if self.rename is not None:
            lines.append(f"the names differ only by prefixes: pass rename={self.rename}")
        for title, entries in parts:
            if entries:
                lines += [f"{len(entries)} {title}:", indented(entries, MOST_NAMES)]
        return "\n".join(lines)

    def add(self, other: LoadReport) -> None:
        """Merges the report on another part of the state dict into this report."""
        self.loaded += other.loaded
        self.missing += other.missing
        self.unexpected = sorted(set(self.unexpected) & set(other.unexpected))
        self.shapes += other.shapes
        self.kinds += other.kinds
        self.dtypes += other.dtypes
        self.grown += other.grown
        self.absent += other.absent
        self.truncated += other.truncated
        self.refused += other.refused


@dataclass(frozen=True)
class ReadMemory:
    """The memory that a load needs on this rank, in bytes. Returned by
    :func:`torch_ckpt.estimate_read_memory`.

    Attributes:
        target_bytes: size of the tensors to load.
        stored_bytes: number of bytes to read from the files.
        beyond_targets_bytes: peak memory use in addition to the targets.
        least_inflight_bytes: the smallest ``max_inflight_bytes`` with which the load succeeds.

    Examples:
        ```python
        memory = torch_ckpt.estimate_read_memory({"model": model}, "checkpoints/100")
        print(f"{memory.beyond_targets_bytes / 1e9:.1f} GB in addition to the model")
        ```
    """

    target_bytes: int
    stored_bytes: int
    beyond_targets_bytes: int
    least_inflight_bytes: int
