"""Whether tensors that ranks should have in common are the same.

A plain tensor (no DTensor) that several ranks have under one name is written by one of them. Where
it differs, be it that replicas have drifted apart or that it is private to each rank, the others'
are lost. Checksums tell.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_ckpt import _C
from torch_ckpt._base.formatting import plural, ranks_text
from torch_ckpt._base.log import warn
from torch_ckpt._base.options import require_choice
from torch_ckpt._base.trees import BITS, as_bytes, host_pieces, is_strided
from torch_ckpt.ranks.calls import Call
from torch_ckpt.saving.events import Event

#: How to look.
MODES = ("off", "warn", "error")

# Of a tensor that is larger only stripes are looked at at every save.
_SAMPLE_BYTES = 64 << 10
_STRIPES = 16


class ReplicaCheck:
    """Looks at the replicas of some of a run's saves.

    All ranks make the same calls, in the same order, each on the thread that saves.

    Args:
        mode: "off", "warn" or "error".
        every: so many saves; the first is one of them.
        process_group: None for the default group.
        timeout: seconds after which a rank that does not come is given up.

    Attributes:
        raises: whether what differs is not to be saved.

    Raises:
        ValueError: there is no such mode, or ``every`` is not positive.
    """

    def __init__(
        self, mode: str, every: int, *, process_group: dist.ProcessGroup | None, timeout: float
    ) -> None:
        require_choice("check_replicas", mode, MODES)
        if every < 1:
            raise ValueError(f"check_replicas_every must be at least 1, got {every}")
        self.raises = mode == "error"
        self._mode = mode
        self._every = every
        self._group = process_group
        self._timeout = timeout
        self._saves = 0

    def is_due(self) -> bool:
        """Whether to look at this save. Called once for each."""
        saves, self._saves = self._saves, self._saves + 1
        return self._mode != "off" and saves % self._every == 0

    def look(
        self,
        step: int,
        state_dict: Callable[[], dict[str, Any]],
        rank: int,
        report: Callable[[Event], None],
    ) -> str:
        """What differs, told; the same text on all ranks, empty where nothing does.

        Args and raises: see :func:`differing_replicas`.
        """
        begun = time.perf_counter()
        lines = differing_replicas(state_dict, self._group, self._timeout)
        seconds = time.perf_counter() - begun
        if not lines:
            return ""
        message = f"step {step}: {told(lines)}"
        report(Event("differing_replicas", step, rank, seconds, message=message))
        if self._mode == "warn" and rank == 0:
            # It names the line that calls the manager.
            warn(message, stacklevel=5)
        return message


def differing_replicas(
    state_dict: Callable[[], dict[str, Any]],
    process_group: dist.ProcessGroup | None,
    timeout: float,
) -> list[str]:
    """What differs, one line for each name, the same on all ranks.

    A name that only some ranks have is compared among these. All plain tensors are read, on the
    calling thread; of those on other devices than the CPU copies are made, 64 MiB at a time.

    Args:
        state_dict: gives it; what it raises is raised here, and named on the other ranks.
        process_group: None for the default group.
        timeout: seconds after which a rank that does not come is given up.

    Raises:
        TimeoutError, ConnectionError, RuntimeError: see :class:`torch_ckpt.ranks.calls.Call`.
    """
    done = 0

    def checksums() -> dict[str, str]:
        nonlocal done
        found = {}
        for name, tensor in _plain_tensors(state_dict()):
            found[name] = f"{tensor.dtype} {list(tensor.shape)} {_checksum(tensor)}"
            done += tensor.nbytes
        return found

    with Call("check_replicas", process_group, timeout) as call:
        if not call.distributed:
            return []
        with call.alive(lambda: done):
            return call.exchange(checksums, _compare)


def checksums_of(tensors: Iterable[torch.Tensor], mode: str) -> bytes:
    """A checksum of 4 bytes for each tensor, one behind another; 0 for what is not plain.

    Args:
        mode: "error" reads all. "warn" reads all of a tensor up to 64 KiB, and 16 stripes of 4 KiB,
            evenly spread, of a larger one: what is private to a rank differs there, too.
    """
    given = list(tensors)
    found: list[int | None] = [None] * len(given)
    if mode != "error":
        found = _C.checksums_of_samples(given, _SAMPLE_BYTES, _STRIPES)
    for number, tensor in enumerate(given):
        if found[number] is None:
            whole = mode == "error" or tensor.nbytes <= _SAMPLE_BYTES
            of_tensor = _checksum if whole else _checksum_of_sample
            found[number] = of_tensor(tensor) if _C.is_plain(tensor) else 0
    return array("I", cast(list[int], found)).tobytes()


def differing_tensors(names: list[list[str]], checksums: list[bytes | None]) -> list[str]:
    """What differs, one line for each name, from each rank's names and its checksums of these."""
    brought: list[dict[str, int]] = []
    for of_rank, data in zip(names, checksums, strict=True):
        sums = array("I")
        sums.frombytes(data or b"")
        brought.append(dict(zip(of_rank, sums, strict=False)))
    if all(of_rank == brought[0] for of_rank in brought):
        return []
    return _compare(brought)


def told(lines: list[str]) -> str:
    """What differs, for an error or a warning."""
    shown = "; ".join(lines[:10]) + ("; and more" if len(lines) > 10 else "")
    return f"{plural(len(lines), 'tensor')} of which one rank's would be saved for all: {shown}"


def _checksum_of_sample(tensor: torch.Tensor) -> int:
    """That of the positions that the engine looks at, of which alone copies are made."""
    bits = tensor.detach().resolve_conj().resolve_neg()
    bits = bits.view(BITS[tensor.itemsize]) if tensor.itemsize in BITS else bits
    length = _SAMPLE_BYTES // _STRIPES // tensor.itemsize
    last = tensor.numel() - length
    begins = [last * stripe // (_STRIPES - 1) for stripe in range(_STRIPES)]
    first = torch.tensor(begins, device="cpu").unsqueeze(1)
    indices = first + torch.arange(length, device="cpu")
    return _checksum(torch.take(bits, indices.to(tensor.device)))


def _plain_tensors(state_dict: dict[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    for path, value in pytree.tree_flatten_with_path(state_dict)[0]:
        if is_strided(value) and not isinstance(value, DTensor):
            yield (
                ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path),
                value,
            )


def _checksum(tensor: torch.Tensor) -> int:
    # Against drift, not against forgery: this one is several times as fast as those that withstand
    # that, and one change in four billion is seen at the next look.
    crc = 0
    for piece in host_pieces(as_bytes(tensor)):
        crc = _C.crc32(piece, crc)
    return crc


def _compare(brought: Sequence[Mapping[str, object]]) -> list[str]:
    lines = []
    for name in sorted({name for of_rank in brought for name in of_rank}):
        holders: dict[object, list[int]] = {}
        for rank, of_rank in enumerate(brought):
            if name in of_rank:
                holders.setdefault(of_rank[name], []).append(rank)
        if len(holders) > 1:
            groups = sorted(holders.values())
            others = "; ".join(f"another on {ranks_text(ranks)}" for ranks in groups[1:])
            lines.append(f"{name} has one value on {ranks_text(groups[0])}; {others}")
    return lines
