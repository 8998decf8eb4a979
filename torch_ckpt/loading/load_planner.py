"""A planner for ``dcp.load`` that lets the engine plan."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from torch_ckpt.checkpoint.lazy_metadata import lazy_contents
from torch_ckpt.loading.load import Load, Match, object_item
from torch_ckpt.loading.page_cache import RankReads
from torch_ckpt.loading.reading import PlansByEngine, Reading

_FLAT = ("state_dict", "mappings")


class LoadPlanner(DefaultLoadPlanner, PlansByEngine):
    """Plans ``dcp.load`` in the same way as ``torch_ckpt.load``. Use this planner with a
    :class:`torch_ckpt.FileSystemReader`. With any other reader, the planner works like torch's
    DefaultLoadPlanner.

    The planner loads complete tensors and DTensors. The hooks of torch's planner
    (``lookup_tensor``, ``commit_tensor``, ``load_bytes`` and others) are not called. If you need
    hooks, derive a planner from torch's DefaultLoadPlanner instead.

    Args:
        allow_partial_load: skip the values that the checkpoint lacks or stores with a different
            shape.

    Raises (from ``dcp.load``, on every rank, inside a ``CheckpointException``):
        LoadMismatch: the checkpoint does not fit the state dict; nothing has been changed.

    Examples:
        ```python
        state = {"model": model.state_dict()}
        dcp.load(
            state,
            storage_reader=torch_ckpt.FileSystemReader("checkpoints/100"),
            planner=torch_ckpt.LoadPlanner(),
        )
        ```
    """

    def __init__(self, *, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._load: Load | None = None
        self._match: Match | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._load = self._match = None
        lazy = lazy_contents(metadata)
        index, reader = (lazy.index, lazy.reader()) if lazy else (None, None)
        if metadata is None or index is None or reader is None or not reader.engine_can_read():
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        self.is_coordinator = is_coordinator
        self.original_state_dict = state_dict
        self.metadata = metadata
        for name in _FLAT:
            vars(self).pop(name, None)
        self._load = Load(reader, opened=(metadata, index))

    def __getattr__(self, name: str) -> Any:
        # torch's planner has these attributes after set_up_planner. Build them on first access
        # only, because that is slow and the engine does not need them.
        if name not in _FLAT or "metadata" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        flat = _flatten_sharded_tensors(self.original_state_dict)
        self.state_dict, self.mappings = flatten_state_dict(flat)
        return vars(self)[name]

    def create_local_plan(self) -> LoadPlan:
        if self._load is None:
            return super().create_local_plan()
        match = self._load.match(self.original_state_dict)
        self._load.require_fit(match.report, strict=not self.allow_partial_load)
        self._match = match
        # The plan has an item that no checkpoint contains, so that a reader of another class fails.
        # If the plan were empty, such a reader would silently read nothing.
        item = object_item("planned by torch_ckpt.LoadPlanner for another reader")
        return LoadPlan([item], storage_data=RankReads.of(match.reading.tensors))

    # --- PlansByEngine ----------------------------------------------------------------------------

    def has_planned(self) -> bool:
        return self._match is not None

    def begin(self) -> Reading:
        load, match = self._load, self._match
        assert load is not None
        assert match is not None
        # Drop these references, so that only the caller keeps the values alive.
        self._load = self._match = None
        return load.begin(match)
