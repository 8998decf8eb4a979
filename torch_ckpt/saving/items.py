"""The items of torch's plans: their values, and the results of their writes."""

from __future__ import annotations

import functools
import io
from collections import ChainMap
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.nn.parameter import is_lazy

from torch_ckpt import _C, _core
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.log import warn
from torch_ckpt._base.planner_hooks import keeps_methods
from torch_ckpt.checkpoint.directory import DirectoryIdentity, OpenDirectory, require_one_directory
from torch_ckpt.checkpoint.metadata import (
    DCP_VERSION,
    encode_metadata,
    require_readable,
    with_checksum_tables,
)
from torch_ckpt.checkpoint.objects import pickled
from torch_ckpt.errors import CheckpointError
from torch_ckpt.saving.write import Written
from torch_ckpt.stores.folder import ObjectFolder

#: Name of the attribute that carries a rank's result to the coordinator. It is set on the storage
#: info of the rank's first item, because torch sends nothing else between ranks.
_WRITTEN = "torch_ckpt_written"


def resolve(
    planner: SavePlanner,
    item: WriteItem,
    direct: bool = False,
    whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> Any:
    """Returns the plain tensor or bytes to write for an item of a plan.

    Args:
        direct: True if the planner uses torch's own lookup (see keeps_default_lookup).
        whole: maps each resolved tensor to the tensor to write.
    """
    value = _found_directly(planner, item) if direct else planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        return cast(io.BytesIO, value).getbuffer()
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            f"{item.index.fqn}: the planner resolved a tensor item to a {type(value).__name__}"
        )
    return as_value(item.index.fqn, whole(value))


def require_savable(name: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError for a tensor without a size or values, which no planner can plan."""
    if is_lazy(tensor):
        raise CheckpointError(
            f"{name}: an uninitialized parameter of a lazy module has no values to save; run the "
            "module once before the save, or leave it out"
        )
    if tensor.is_nested:
        raise CheckpointError(
            f"{name}: a nested tensor cannot be saved; save its values and offsets (or the tensors "
            "of unbind()) instead"
        )


def as_value(name: str, tensor: torch.Tensor) -> Any:
    """Returns the value that the engine writes for a tensor: the tensor itself if it is plain,
    otherwise the bytes that torch.save writes for it.

    Raises:
        CheckpointError: torch.save cannot write the tensor. The error gives the name.
    """
    try:
        return _converted(tensor)
    except Exception as error:
        layout = "" if tensor.layout == torch.strided else f" with layout {tensor.layout}"
        raise CheckpointError(
            f"{name}: a tensor of dtype {tensor.dtype}{layout} cannot be saved "
            f"({type(error).__name__}: {error}); convert it to a plain tensor first (to_dense(), "
            "for example, or another dtype), or leave it out"
        ) from error


def _converted(tensor: torch.Tensor) -> Any:
    if tensor.is_cuda and not _C.is_dense(tensor):
        # Let the device gather the elements, because the engine copies only contiguous runs of
        # device memory. RankWrite.run waits for the clone.
        tensor = tensor.detach().clone()
    if _C.is_plain(tensor):
        return tensor
    if tensor.is_cuda and not _C.has_cuda:
        warn_without_cuda(_C.no_cuda_reason)
    # Copy the tensor in the same way as torch's writer. This fails for tensors that torch could not
    # load again, such as sparse tensors.
    detached = tensor.detach().cpu()
    if detached.untyped_storage().nbytes() != detached.numel() * detached.itemsize:
        detached = detached.clone()
    return pickled(detached)


def keeps_default_lookup(planner: SavePlanner) -> bool:
    """Returns True if the planner overrides none of torch's lookup hooks."""
    hooks = ("resolve_data", "lookup_object", "transform_object")
    return keeps_methods(planner, DefaultSavePlanner, hooks)


def _found_directly(planner: SavePlanner, item: WriteItem) -> Any:
    """Returns the result of ``planner.resolve_data``. For complete plain tensors, this function is
    ten times as fast."""
    value = planner.state_dict.get(item.index.fqn)  # type: ignore[attr-defined]
    if item.type == WriteItemType.TENSOR and type(value) in (torch.Tensor, torch.nn.Parameter):
        return value
    return planner.resolve_data(item)


@no_gc()
def results_of(items: list[WriteItem], written: Written) -> list[WriteResult]:
    """Builds DCP's write result for each item. The first result carries the checksum tables to the
    coordinator."""
    results = [
        WriteResult(item.index, length, _StorageInfo(file, offset, length))
        for item, (file, offset, length, _) in zip(items, written.files.locations(), strict=True)
    ]
    if results:
        setattr(results[0].storage_data, _WRITTEN, (written.files.tables, written.directory))
    return results


def sources_of(items: list[WriteItem], planner: SavePlanner) -> _C.SaveSources:
    """Returns the values of the items of a plan."""
    sources = _C.SaveSources()
    with no_gc():
        direct = keeps_default_lookup(planner)
        for item in items:
            sources.add(item.index.fqn, resolve(planner, item, direct))
    return sources


def completed(value: list[Any]) -> Future[list[WriteResult]]:
    """Returns a completed future with the results of the writes."""
    future: Future[list[WriteResult]] = Future()
    future.set_result(value)
    return future


def encoded_with(
    results: list[list[WriteResult]],
    metadata: Metadata,
    storage_meta: StorageMeta | None,
    directory: OpenDirectory | ObjectFolder,
) -> _core.EncodedMetadata:
    """Adds the results of all ranks to a plan's metadata, and returns the contents of
    ``.metadata``.

    Args:
        directory: the checkpoint directory or its objects, as opened on the coordinator.

    Raises:
        NotCommitted: ranks have written to different directories.
        CheckpointError: the metadata could not be loaded again.
    """
    with no_gc():
        metadata.version = DCP_VERSION
        metadata.storage_meta = storage_meta
        metadata.storage_data = {
            result.index: result.storage_data for of_rank in results for result in of_rank
        }
        tables, directories = _pop_checksum_tables(results)
        data = encode_metadata(with_checksum_tables(metadata, dict(ChainMap(*tables))))
    require_one_directory([DirectoryIdentity.of(directory), *directories])
    require_readable(data, directory.path)
    return _core.EncodedMetadata(data)


def _pop_checksum_tables(
    results: list[list[WriteResult]],
) -> tuple[list[dict[str, bytes]], list[DirectoryIdentity]]:
    """Removes each rank's checksum tables, by file name, and directory identity from the results,
    and returns them."""
    tables: list[dict[str, bytes]] = []
    directories: list[DirectoryIdentity] = []
    for of_rank in results:
        for result in of_rank:
            popped = vars(result.storage_data).pop(_WRITTEN, None)
            if popped is not None:
                tables.append(popped[0])
                directories.append(popped[1])
    return tables, directories


@functools.cache
def warn_without_cuda(reason: str) -> None:
    """Warns, once per process, that torch.save writes CUDA tensors, which is slow."""
    warn(
        f"torch_ckpt found no CUDA runtime that it can use ({reason}), so CUDA tensors are "
        "copied to host memory and written by torch.save, which is slow and blocks the caller. "
        "Install torch for CUDA 12 or 13 from PyPI or pytorch.org.",
    )
