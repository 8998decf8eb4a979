"""``torch-ckpt explain``: the data that each rank wrote, and ranks that stand out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import torch_ckpt
from tests.commands import Run
from tests.support import stock_save
from torch_ckpt.checkpoint.metadata import encode_metadata
from torch_ckpt.inspection.explain import explain

MB = 1_000_000


def checkpoint(
    path: Path, bytes_of_ranks: list[int], phases: list[list[float]] | str | None = None
) -> Path:
    """Makes the metadata of a tensor of which each rank has stored some bytes, without data
    files."""
    chunks, places, begin = [], {}, 0
    for rank, count in enumerate(bytes_of_ranks):
        chunk = ChunkStorageMetadata(torch.Size([begin]), torch.Size([count]))
        chunks.append(chunk)
        where = _StorageInfo(f"__{rank}_0.distcp", 0, count)
        places[MetadataIndex("w", chunk.offsets, rank)] = where
        begin += count
    properties = TensorProperties(dtype=torch.uint8)
    stored = TensorStorageMetadata(properties, torch.Size([begin]), chunks)
    metadata = Metadata({"w": stored}, {}, places)
    if phases is not None:
        text = phases if isinstance(phases, str) else json.dumps(phases)
        metadata.torch_ckpt = {"version": 1, "checksums": {}, "phases": text}  # type: ignore[attr-defined]
    path.mkdir(exist_ok=True)
    (path / ".metadata").write_bytes(encode_metadata(metadata))
    return path


def test_each_rank_is_listed_with_the_bytes_that_it_wrote(tmp_path: Path) -> None:
    found = explain(checkpoint(tmp_path, [3 * MB, 4 * MB]))
    assert [(s.rank, s.records, s.bytes, s.files) for s in found.ranks] == [
        (0, 1, 3 * MB, ["__0_0.distcp"]),
        (1, 1, 4 * MB, ["__1_0.distcp"]),
    ]


def test_the_duration_of_a_save_of_ours_is_listed(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.ones(1000), "step": 3}, tmp_path)
    (share,) = explain(tmp_path).ranks
    for seconds in (share.plan_s, share.find_s, share.write_s):
        assert seconds is not None
        assert 0 <= seconds < 60


def test_a_tensor_of_one_record_is_counted_separately(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.ones(1000), "step": 3}, tmp_path)
    (share,) = explain(tmp_path).ranks
    stored = sum(os.path.getsize(file) for file in tmp_path.glob("*.distcp"))
    assert share.whole_bytes == share.bytes <= stored
    assert share.largest[0] == "w"


def test_a_checkpoint_of_stock_torch_has_no_duration(tmp_path: Path) -> None:
    stock_save({"w": torch.ones(10)}, tmp_path)
    (share,) = explain(tmp_path).ranks
    assert share.rank == 0
    assert share.write_s is None


def test_a_rank_that_wrote_more_than_the_others_is_named(tmp_path: Path) -> None:
    found = explain(checkpoint(tmp_path, [MB, 9 * MB, MB, MB]))
    assert any("rank 1 wrote 3.0 times the mean" in remark for remark in found.remarks)


@pytest.mark.parametrize(
    ("phases", "remark"),
    [
        ([[0.1, 0.1, 1.0], [0.1, 0.1, 5.0], [0.1, 0.1, 1.0]], "rank 1 took 5.00 s to write"),
        ([[0.1, 0.1, 1.0], [0.1, 0.1, 1.0], [0.1, 7.0, 1.0]], "rank 2 took 7.00 s to collect"),
    ],
)
def test_a_slow_rank_is_named(tmp_path: Path, phases: list[list[float]], remark: str) -> None:
    found = explain(checkpoint(tmp_path, [MB, MB, MB], phases))
    assert any(remark in line for line in found.remarks)


def test_no_rank_is_named_if_all_are_similar(tmp_path: Path) -> None:
    found = explain(checkpoint(tmp_path, [MB] * 3, [[0.1, 0.1, 1.0]] * 3))
    assert len(found.remarks) == 1


NO_SECONDS = ["", "{", "[1]", '[["a", 1, 2]]', "[null]", "[[1, 2]]", "5", "[" * 10**5]


@pytest.mark.parametrize("phases", [*NO_SECONDS, f"[[1, 2, {10**400}]]"])
def test_an_invalid_duration_is_ignored(tmp_path: Path, phases: str) -> None:
    found = explain(checkpoint(tmp_path, [MB, MB], phases))
    assert [share.write_s for share in found.ranks] == [None, None]


def test_the_command_prints_a_line_for_each_rank(tmp_path: Path, run: Run) -> None:
    lines = run("explain", checkpoint(tmp_path, [MB, MB])).splitlines()
    assert lines[0].split()[:3] == ["RANK", "RECORDS", "BYTES"]
    assert [line.split()[0] for line in lines[1:3]] == ["0", "1"]


def test_the_command_writes_json(tmp_path: Path, run: Run) -> None:
    document = run.json("explain", checkpoint(tmp_path, [MB, MB]))
    assert [share["rank"] for share in document["ranks"]] == [0, 1]
