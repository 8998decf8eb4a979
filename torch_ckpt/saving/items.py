"""The items of a plan: their values, and their results."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,
)
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt import _C, _core
from torch_ckpt._base.cuda_build import warn_without_cuda
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.planner_hooks import keeps_methods
from torch_ckpt.checkpoint.directory import Place
from torch_ckpt.errors import CheckpointError

#: What a rank has written travels to the coordinator as an attribute of this name, of the storage
#: info of the rank's first item: torch carries nothing else from rank to rank.
_WRITTEN = "torch_ckpt_written"


@dataclasses.dataclass
class Written:
    """What one rank has written.

    Attributes:
        files: with the place and CRC-32 of each value.
        directory: in which the files are.
        seconds: that planning, finding the values and writing took; None: not known.
    """

    files: _core.WrittenFiles
    directory: Place
    seconds: tuple[float, float, float] | None = None


def names_of_files(written: list[Written]) -> set[str]:
    """Of all ranks, in the checkpoint's directory."""
    return {name for of_rank in written for name in of_rank.files.names}


def resolve(
    planner: SavePlanner,
    item: WriteItem,
    direct: bool = False,
    whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> Any:
    """The plain tensor or bytes that stand for an item of a plan.

    Args:
        direct: the planner's lookup is torch's own (see keeps_default_lookup).
        whole: makes of a tensor the one to write.
    """
    value = _found_directly(planner, item) if direct else planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        return cast(io.BytesIO, value).getbuffer()
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            f"{item.index.fqn}: the planner resolved a tensor item to a {type(value).__name__}"
        )
    return as_value(whole(value))


def as_value(tensor: torch.Tensor) -> Any:
    """What the engine writes for a tensor: itself, or torch.save's bytes where it is not plain."""
    if tensor.is_cuda and not _C.is_dense(tensor):
        # The engine copies runs of device memory; the device gathers best. This comes before
        # _wait_for_devices, which waits for it.
        tensor = tensor.detach().clone()
    if _C.is_plain(tensor):
        return tensor
    if tensor.is_cuda and not _C.has_cuda:
        warn_without_cuda()
    # As torch's writer, which refuses here what it could not load again (sparse tensors).
    detached = tensor.detach().cpu()
    if detached.untyped_storage().nbytes() != detached.numel() * detached.itemsize:
        detached = detached.clone()
    stream = io.BytesIO()
    torch.save(detached, stream)
    return stream.getbuffer()


def keeps_default_lookup(planner: SavePlanner) -> bool:
    """Whether no hook of the user's sees the data that is resolved."""
    hooks = ("resolve_data", "lookup_object", "transform_object")
    return keeps_methods(planner, DefaultSavePlanner, hooks)


def _found_directly(planner: SavePlanner, item: WriteItem) -> Any:
    """What ``planner.resolve_data`` returns, at a tenth of its time for whole plain tensors."""
    value = planner.state_dict.get(item.index.fqn)  # type: ignore[attr-defined]
    if item.type == WriteItemType.TENSOR and type(value) in (torch.Tensor, torch.nn.Parameter):
        return value
    return planner.resolve_data(item)


@no_gc()
def results_of(items: list[WriteItem], written: Written) -> list[WriteResult]:
    """What DCP is told of each item; with it the checksum tables travel to the coordinator."""
    results = [
        WriteResult(item.index, length, _StorageInfo(file_name, offset, length))
        for item, (file_name, offset, length, _) in zip(items, written.files.places(), strict=True)
    ]
    if results:
        setattr(results[0].storage_data, _WRITTEN, (written.files.tables, written.directory))
    return results


def brought_with(results: list[list[WriteResult]]) -> tuple[dict[str, bytes], list[Place]]:
    """The files' checksum tables and the ranks' directories; the results then are as torch's."""
    tables: dict[str, bytes] = {}
    directories: list[Place] = []
    for of_rank in results:
        for result in of_rank:
            brought = vars(result.storage_data).pop(_WRITTEN, None)
            if brought is not None:
                tables |= brought[0]
                directories.append(brought[1])
    return tables, directories
