"""What a load did, and how much memory one takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from torch_ckpt._base.formatting import MOST_NAMES
from torch_ckpt.loading.dtypes import loses_precision

#: Patterns as of :mod:`fnmatch`, or a function of the fully qualified name.
Names = Iterable[str] | Callable[[str], bool] | None


@dataclass
class LoadReport:
    """How a state dict and a checkpoint compare. Names are fully qualified ones.

    Attributes:
        loaded: what both have and what fits.
        missing: what the checkpoint does not have.
        unexpected: what only the checkpoint has; no hindrance to a load.
        shapes: (name, stored, wanted) of tensors whose shape does not fit.
        kinds: (name, stored, wanted) of what is a tensor there and something else here, or the
            other way round.
        dtypes: (name, stored, wanted) of tensors that are converted.
        grown: (name, stored, wanted) of tensors that ``zero_fill`` fills up.
        absent: keys at the top, of dicts and ``Stateful`` values of which nothing can be loaded.
        truncated: (name, stored, wanted) of tensors of which ``allow_shape_mismatch`` loads a part;
            one that is larger in another dimension is in ``grown``, too.
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

    @property
    def fits(self) -> bool:
        """Whether all of the state dict can be loaded."""
        return not (self.missing or self.shapes or self.kinds)

    @property
    def narrowed(self) -> list[str]:
        """Names of the tensors whose dtype holds less than the stored one."""
        return [name for name, stored, wanted in self.dtypes if loses_precision(stored, wanted)]

    @property
    def skipped(self) -> list[str]:
        """What a load with ``strict=False`` leaves as it is: each name, with the reason."""
        return [
            *(f"{name} (missing)" for name in self.missing),
            *(f"{n} (stored {list(has)}, wanted {list(wants)})" for n, has, wants in self.shapes),
            *(f"{name} (stored {has}, wanted {wants})" for name, has, wants in self.kinds),
        ]

    def __str__(self) -> str:
        def sized(entries: list[tuple[str, torch.Size, torch.Size]]) -> list[str]:
            return [f"{n}: stored {list(has)}, wanted {list(wants)}" for n, has, wants in entries]

        parts = [
            ("missing in the checkpoint", self.missing),
            ("of another shape", sized(self.shapes)),
            ("of another kind", [f"{n}: stored {a}, wanted {b}" for n, a, b in self.kinds]),
            ("only in the checkpoint", self.unexpected),
            ("of another dtype", [f"{n}: stored {a}, wanted {b}" for n, a, b in self.dtypes]),
            ("larger than stored", sized(self.grown)),
            ("smaller than stored", sized(self.truncated)),
        ]
        lines = [f"{len(self.loaded)} names fit"]
        for title, entries in parts:
            if not entries:
                continue
            lines.append(f"{len(entries)} {title}:")
            lines.extend(f"  {entry}" for entry in entries[:MOST_NAMES])
            if len(entries) > MOST_NAMES:
                lines.append(f"  and {len(entries) - MOST_NAMES} more")
        return "\n".join(lines)

    def add(self, other: LoadReport) -> None:
        """Adds what a report about another part of the state dict says."""
        self.loaded += other.loaded
        self.missing += other.missing
        self.unexpected = sorted(set(self.unexpected) & set(other.unexpected))
        self.shapes += other.shapes
        self.kinds += other.kinds
        self.dtypes += other.dtypes
        self.grown += other.grown
        self.absent += other.absent
        self.truncated += other.truncated


@dataclass(frozen=True)
class ReadMemory:
    """What a load takes, in bytes.

    Attributes:
        target_bytes: of the tensors on this rank that are loaded.
        stored_bytes: that are wanted from the files, by this rank.
        beyond_targets_bytes: the most that is held beside the targets at any time.
        least_inflight_bytes: the smallest ``max_inflight_bytes`` with which the load works.
    """

    target_bytes: int
    stored_bytes: int
    beyond_targets_bytes: int
    least_inflight_bytes: int
