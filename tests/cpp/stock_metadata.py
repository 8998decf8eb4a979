"""Prints tests/cpp/stock_metadata.cpp: metadata as the installed torch pickles it.

    .venv/bin/python -m tests.cpp.stock_metadata > tests/cpp/stock_metadata.cpp
    clang-format -i tests/cpp/stock_metadata.cpp

The C++ tests and the fuzzers need no torch: they use these constants.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import OrderedDict
from pathlib import Path

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType

from tests.cpp.stock_records import literal
from torch_ckpt.checkpoint.metadata import encode_metadata, with_checksum_tables


def small() -> Metadata:
    state = {"weight": torch.zeros(2, 300), "bias": torch.zeros(2), "step": 3}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    locations = {item.index: _StorageInfo("__0_0.distcp", 70_000, 90) for item in plans[0].items}
    metadata.storage_data = locations
    metadata.storage_meta = StorageMeta(Path("/checkpoints/1"))
    return metadata


def rich() -> Metadata:
    """Adds kinds of values that only Megatron's and older checkpoints have."""
    metadata = small()
    planner = DefaultSavePlanner()
    planner.set_up_planner({"weight": torch.zeros(2), "step": 3}, is_coordinator=True)
    metadata.all_local_plans = [planner.create_local_plan()]  # type: ignore[attr-defined]
    metadata.storage_data = [_StoragePrefix("__0_")]
    shards = [ShardMetadata([0, 0], [2, 3])]
    metadata.planner_data = {
        "shards": ShardedTensorMetadata(shards, torch.Size([2, 3])),
        "other": [None, True, 2**40, 0.5, (1, ("two",)), {3: {}}, OrderedDict(a=1), "x" * 300],
    }
    return metadata


def with_looked_up_members(metadata: Metadata, protocol: int) -> bytes:
    """Pickles members of enums by getattr, like Python 3.11.0 to 3.11.3."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol)
    pickler.dispatch_table = copyreg.dispatch_table | {
        kind: lambda member: (getattr, (type(member), member.name))
        for kind in (_MEM_FORMAT_ENCODING, WriteItemType)
    }
    pickler.dump(metadata)
    return stream.getvalue()


def main() -> None:
    tables = {"__0_0.distcp": bytes(range(40))}
    sealed = encode_metadata(with_checksum_tables(small(), tables))
    seeds = {
        "ours": sealed[:-16],
        **{f"small_{protocol}": pickle.dumps(small(), protocol) for protocol in (2, 5)},
        **{f"rich_{protocol}": pickle.dumps(rich(), protocol) for protocol in (2, 3, 4)},
        "rich_looked_up": with_looked_up_members(rich(), 4),
    }
    print(f"// Printed by stock_metadata.py from torch {torch.__version__}; do not edit.\n")
    print('#include "stock_metadata.h"\n')
    print("namespace torch_ckpt::test {\n\nusing namespace std::string_view_literals;\n")
    print("const std::vector<StockMetadata>& stock_metadata() {")
    print("static const std::vector<StockMetadata> kMetadata = {")
    for name, data in seeds.items():
        print(f'{{"{name}",\n{literal(data)}}},')
    print("};\nreturn kMetadata;\n}\n\n}  // namespace torch_ckpt::test")


if __name__ == "__main__":
    main()
