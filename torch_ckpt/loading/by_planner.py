"""Loads with a planner of the caller, by ``dcp.load``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from torch_ckpt.checkpoint.opened import Checkpoint
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.loading.reader import FileSystemReader
from torch_ckpt.options import ReadOptions, named_options
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.ranks.failures import reraise_torch_failures
from torch_ckpt.state.states import States


class SourceReader(FileSystemReader):
    """Reads any source for ``dcp.load``.

    Args:
        source: the checkpoint, which the reader opens and closes.
        process_group: see :class:`FileSystemReader`.
    """

    def __init__(self, source: Source, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(source.title, process_group=process_group, **named_options(source.options))
        self._own_source = source

    @property
    def checkpoint_id(self) -> str:
        return self._own_source.title

    def _is_local(self) -> bool:
        return True

    def _new_source(self) -> Source:
        return self._own_source


def load_by_dcp(
    state_dict: dict[str, Any],
    source_of: Callable[[], Source],
    planner: LoadPlanner,
    ranks: Exchange,
    process_group: dist.ProcessGroup | None,
    is_strict: bool,
) -> Checkpoint:
    """Loads a state dict by ``dcp.load`` with a planner.

    Args:
        state_dict, planner, process_group: see :func:`torch_ckpt.load`.
        source_of: creates the source. If it fails, the load fails on all ranks.
        ranks: the ranks that load together.
        is_strict: True if the caller requires that all values are loaded, under their own names.
    """
    with ranks:
        States(state_dict)
        if not is_strict:
            raise ValueError(
                "strict=False, names, rename and free_before_read do not work with a planner. Omit "
                "them, or load without a planner."
            )
        _require_states(state_dict)
        source = source_of()
        reader = SourceReader(source, process_group)
    with reraise_torch_failures(ranks.rank):
        dcp_load(
            state_dict,
            storage_reader=reader,
            planner=planner,
            process_group=process_group,
            no_dist=not ranks.distributed,
        )
    read = ReadOptions(storage_options=source.options.storage_options)
    return Checkpoint(source.title, options=read)


def _require_states(state_dict: dict[str, Any]) -> None:
    """Raises ValueError if the state dict has an optimizer that ``dcp.load`` would not restore."""
    for key, value in state_dict.items():
        if isinstance(value, torch.optim.Optimizer) and not value.state:
            raise ValueError(
                f"{key}: this optimizer has no state yet, so dcp.load would not restore it, and "
                "dcp.load is used with a planner or a file system that is not local. Load local "
                "files without a planner, or pass get_optimizer_state_dict(model, optimizer) from "
                "torch.distributed.checkpoint.state_dict."
            )
