"""Reads data that several ranks want from only one of these ranks (``read_once``).

Metadata beneath a URL: rank 0 opens the checkpoint, reads the metadata and broadcasts it
(:func:`open_once`). The other ranks open the checkpoint without a request. In a directory, every
rank reads the metadata, because it opens and locks the directory anyway.

Data (:func:`read_once`):

1. Every rank sends digests of its reads to all ranks, or reports that it has failed. If any rank
   has failed, no rank reads. The smallest memory limit of all ranks applies to the data sent.
2. Each read that several ranks want is assigned to one of them, its owner, so that all ranks read
   about the same number of bytes. Every rank computes the same assignment independently.
3. Every rank reads its assignment, and the data that only it wants, into its targets.
4. All ranks exchange whether their reads succeeded. After a failure, nothing is sent.
5. One owner after the other sends its data to the other ranks, in batches.

Only contiguous tensors are shared. Every rank itself reads objects and tensors of other layouts. A
rank whose planner has hooks reads everything itself; it joins the exchanges with nothing to share.

A large tensor is first split along its first dimension, so that several ranks can read parts of it.
This requires that the parts can be verified.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_ckpt import _C
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.dtypes import lost_precision
from torch_ckpt.checkpoint.reading import Reading
from torch_ckpt.checkpoint.source import RemoteMetadata, Source
from torch_ckpt.checkpoint.tensor_bytes import as_bytes
from torch_ckpt.ranks.exchange import Exchange

#: Maximum size in bytes of a batch, and of a part of a large tensor.
BATCH_BYTES = 64 << 20

_FAILED = "failed"


def open_once(
    source: Source, names: Sequence[str], ranks: Exchange, group: dist.ProcessGroup | None
) -> None:
    """Opens a checkpoint beneath a URL on all ranks of the group, which all must call it.

    Opens nothing on the other ranks if they load other paths, or if the checkpoint is a directory
    or consists of safetensors files: then each rank must open the checkpoint itself.

    Args:
        names: see :meth:`Source.open`.
        ranks: the ranks of the group, which exchange failures.
    """

    def open_first() -> tuple[tuple[str, RemoteMetadata | None], bytes]:
        path, found = os.fspath(source.path), None
        if ranks.rank == 0 and is_url(path):
            source.open(names)
            found = source.remote_metadata()
        if found is None:
            return (path, None), b""
        return (path, found._replace(data=b"")), found.data

    def combine(opened: list[tuple[str, RemoteMetadata | None]]) -> RemoteMetadata | None:
        return opened[0][1] if len({path for path, _found in opened}) == 1 else None

    def receive() -> None:
        with ranks.alive(source.progress), source.elsewhere():
            received = _broadcast(data, group)
        assert found is not None
        if ranks.rank != 0:
            source.open(names, found._replace(data=received))

    found, data = ranks.exchange("open", open_first, combine)
    if found is not None:
        ranks.run("open", receive)


def read_once(
    source: Source, prepare: Callable[[], Reading], group: dist.ProcessGroup | None
) -> None:
    """Performs the reads that ``prepare`` returns, so that one rank reads the data that several
    ranks want. All ranks of the group must call it, or :func:`read_independently`.

    If a rank fails, it raises the error. The other ranks return without loading and without an
    error: the caller must report the failure to them.
    """
    reading = Reading()
    reads: list[_C.TensorRead] = []
    digests: list[tuple[bytes | None, int]] = []

    @no_gc()
    def plan() -> tuple[list[tuple[bytes | None, int]], int]:
        nonlocal reading
        reading = prepare()
        reading.tensors.split(BATCH_BYTES, source.verifies_parts())
        reads.extend(reading.tensors)
        digests.extend(_digests(source.metadata_digest, reads))
        return digests, source.options.max_inflight_bytes

    plans = _exchange(source, plan, group)
    if not plans:
        return
    owners = _choose_owners([digests for digests, _limit in plans])
    rank = dist.get_rank(group)

    def read() -> None:
        own = [
            number
            for number, (digest, _bytes) in enumerate(digests)
            if digest is None or owners.get(digest, (rank, ()))[0] == rank
        ]
        source.read(reading, reading.tensors.subset(own))

    if not _exchange(source, read, group):
        return
    # This rank also converts the tensors that other ranks have read.
    source.narrowed.update(lost_precision(reading.tensors))
    targets = {
        digest: read.tensor
        for read, (digest, _bytes) in zip(reads, digests, strict=True)
        if digest is not None
    }
    with source.elsewhere():
        _send_all(owners, targets, min(limit for _digests, limit in plans), group)


def read_independently(
    source: Source, read: Callable[[], None], group: dist.ProcessGroup | None
) -> None:
    """Reads on this rank only, and joins the exchanges of ranks that call :func:`read_once`."""
    if _exchange(source, lambda: ([], source.options.max_inflight_bytes), group):
        _exchange(source, read, group)


def _exchange(
    source: Source, local: Callable[[], Any], group: dist.ProcessGroup | None
) -> list[Any]:
    """Calls a function on every rank and returns the results of all ranks. If it fails on a rank,
    that rank raises the error, and all other ranks return an empty list."""
    failure: BaseException | None = None
    try:
        value = local()
    except BaseException as error:
        failure, value = error, _FAILED
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with source.elsewhere():
        dist.all_gather_object(gathered, value, group=group)
    if failure is not None:
        raise failure
    return [] if _FAILED in gathered else gathered


def _digests(
    checkpoint: bytes | None, reads: list[_C.TensorRead]
) -> list[tuple[bytes | None, int]]:
    """Returns the digest and the size in bytes of each read. Repeated digests become None."""
    digests: list[tuple[bytes | None, int]] = []
    seen: set[bytes | None] = set()
    for read in reads:
        digest = _digest(checkpoint, read) if checkpoint else None
        digests.append((None if digest in seen else digest, read.tensor.nbytes))
        seen.add(digest)
    return digests


def _digest(checkpoint: bytes, read: _C.TensorRead) -> bytes | None:
    """Returns a digest of what is read and into what kind of target. Returns None if the data
    cannot be shared with other ranks."""
    target = read.tensor
    if type(target) not in (torch.Tensor, torch.nn.Parameter) or not _is_its_bytes(target):
        return None
    what = (
        # Ranks may read different checkpoints with equal file names.
        checkpoint,
        read.file,
        read.offset,
        read.length,
        tuple(read.region_offsets),
        tuple(read.region_lengths),
        str(target.dtype),
        target.device.type,
    )
    return hashlib.blake2b(repr(what).encode(), digest_size=16).digest()


def _is_its_bytes(tensor: torch.Tensor) -> bool:
    """Returns True if the tensor's values can be written as bytes into contiguous memory."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return (
        tensor.is_contiguous()
        and not lazy
        and not tensor.is_quantized
        and not tensor.is_inference()
    )


def _choose_owners(
    plans: list[list[tuple[bytes | None, int]]],
) -> dict[bytes, tuple[int, tuple[int, ...]]]:
    """Returns, for each digest that several ranks want, the rank that reads the data and the ranks
    that want it. The result has the same order on all ranks."""
    wanted: dict[bytes, list[int]] = defaultdict(list)
    sizes: dict[bytes, int] = {}
    load = [0] * len(plans)
    for rank, plan in enumerate(plans):
        for digest, size in plan:
            if digest is None:
                load[rank] += size
            else:
                wanted[digest].append(rank)
                sizes[digest] = size
    owners = {}
    for digest, ranks in sorted(wanted.items(), key=lambda entry: (-sizes[entry[0]], entry[0])):
        owner = min(ranks, key=lambda rank: load[rank])
        load[owner] += sizes[digest]
        if len(ranks) > 1:
            owners[digest] = (owner, tuple(ranks))
    return owners


def _send_all(
    owners: dict[bytes, tuple[int, tuple[int, ...]]],
    targets: dict[bytes, torch.Tensor],
    max_bytes: int,
    group: dist.ProcessGroup | None,
) -> None:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    routes: dict[tuple[int, tuple[int, ...]], list[bytes]] = defaultdict(list)
    for digest, route in owners.items():
        routes[route].append(digest)
    for (owner, ranks), digests in sorted(routes.items()):
        if rank not in ranks:
            continue
        parts = _batches((as_bytes(targets[d]) for d in digests), min(BATCH_BYTES, max_bytes // 4))
        for batch in parts:
            device = _device_of(group, batch[0].device)
            buffer = torch.empty(sum(p.numel() for p in batch), dtype=torch.uint8, device=device)
            if rank == owner:
                torch.cat([p.to(buffer.device) for p in batch], out=buffer)
            _send(buffer, owner, ranks, world_size, group)
            if rank == owner:
                continue
            begin = 0
            for part in batch:
                part.copy_(buffer[begin : begin + part.numel()])
                begin += part.numel()


def _broadcast(data: bytes, group: dist.ProcessGroup | None) -> bytes:
    """Returns the bytes that the first rank of the group passes."""
    first = 0 if group is None else dist.get_global_rank(group, 0)
    device = _device_of(group, torch.device("cpu"))
    size = torch.tensor(len(data), device=device)
    dist.broadcast(size, src=first, group=group)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    if data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src=first, group=group)
    return buffer.cpu().numpy().tobytes()


def _batches(tensors: Iterable[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        for begin in range(0, tensor.numel(), most):
            part = tensor[begin : begin + most]
            if held + part.numel() > most:
                yield batch
                batch, held = [], 0
            batch.append(part)
            held += part.numel()
    if batch:
        yield batch


def _send(
    buffer: torch.Tensor,
    owner: int,
    ranks: tuple[int, ...],
    world_size: int,
    group: dist.ProcessGroup | None,
) -> None:
    source = dist.get_global_rank(group, owner) if group is not None else owner
    if len(ranks) == world_size:
        dist.broadcast(buffer, src=source, group=group)
    elif dist.get_rank(group) != owner:
        dist.recv(buffer, src=source, group=group)
    else:
        for other in ranks:
            if other != owner:
                to = dist.get_global_rank(group, other) if group is not None else other
                dist.send(buffer, dst=to, group=group)


def _device_of(group: dist.ProcessGroup | None, wanted: torch.device) -> torch.device:
    """Returns the device from which the process group sends data that is on ``wanted``: the device
    itself with NCCL, usually the CPU otherwise."""
    config = dist.get_backend_config(group)
    backends = dict(pair.split(":") for pair in config.split(",") if ":" in pair)
    if not backends:
        backends = {"cuda" if config == "nccl" else "cpu": config}
    if backends.get(wanted.type) in ("nccl", "xccl"):
        return wanted
    if "cpu" in backends:
        return torch.device("cpu")
    kind = wanted.type if wanted.type in backends else next(iter(backends))
    return wanted if wanted.type == kind else torch.device(kind, _current_index(kind))


def _current_index(kind: str) -> int:
    return int(torch.get_device_module(kind).current_device())
