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
    """Makes the metadata of a tensor of which each rank has stored some bytes, and sparse data
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
    for where in places.values():
        with open(path / where.relative_path, "wb") as file:
            file.truncate(where.length)
    return path


def test_each_rank_is_listed_with_the_bytes_that_it_wrote(tmp_path: Path) -> None:
    found = explain(checkpoint(tmp_path, [3 * MB, 4 * MB]))
    assert [(s.rank, s.records, s.bytes, s.files) for s in found.ranks] == [
        (0, 1, 3 * MB, ["__0_0.distcp"]),
        (1, 1, 4 * MB, ["__1_0.distcp"]),
    ]


def test_a_save_of_ours_has_durations_and_bytes_of_unsharded_tensors(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.ones(1000), "step": 3}, tmp_path)
    (share,) = explain(tmp_path).ranks
    for seconds in (share.plan_s, share.find_s, share.write_s):
        assert seconds is not None
        assert 0 <= seconds < 60
    stored = sum(os.path.getsize(file) for file in tmp_path.glob("*.distcp"))
    assert share.whole_bytes == share.bytes <= stored
    assert share.largest[0] == "w"


def test_a_checkpoint_of_stock_torch_has_no_duration(tmp_path: Path) -> None:
    stock_save({"w": torch.ones(10)}, tmp_path)
    (share,) = explain(tmp_path).ranks
    assert share.rank == 0
    assert share.write_s is None


QUICK = [0.1, 0.1, 1.0]


@pytest.mark.parametrize(
    ("counts", "phases", "remark"),
    [
        ([1, 9, 1, 1], None, "rank 1 wrote 3.0 times the mean"),
        ([1, 1, 1], [QUICK, [0.1, 0.1, 5.0], QUICK], "rank 1 took 5.00 s to write"),
        ([1, 1, 1], [QUICK, QUICK, [0.1, 7.0, 1.0]], "rank 2 took 7.00 s to collect"),
        ([1, 1, 1], [QUICK] * 3, None),
    ],
    ids=["much data", "slow writes", "slow collection", "similar ranks"],
)
def test_only_a_rank_that_differs_is_named(
    tmp_path: Path, counts: list[int], phases: list[list[float]] | None, remark: str | None
) -> None:
    remarks = explain(checkpoint(tmp_path, [count * MB for count in counts], phases)).remarks
    if remark is None:
        assert len(remarks) == 1
    else:
        assert any(remark in line for line in remarks)


NO_SECONDS = ["", "{", "[1]", '[["a", 1, 2]]', "[null]", "[[1, 2]]", "5", "[" * 10**5]


@pytest.mark.parametrize("phases", [*NO_SECONDS, f"[[1, 2, {10**400}]]"])
def test_an_invalid_duration_is_ignored(tmp_path: Path, phases: str) -> None:
    found = explain(checkpoint(tmp_path, [MB, MB], phases))
    assert [share.write_s for share in found.ranks] == [None, None]


def test_missing_and_short_files_are_named_and_are_a_finding(tmp_path: Path, run: Run) -> None:
    path = checkpoint(tmp_path, [MB, MB, MB])
    (path / "__1_0.distcp").unlink()
    os.truncate(path / "__2_0.distcp", MB - 1)
    faults = ["__1_0.distcp (missing)", "__2_0.distcp (too short)"]
    assert explain(path).faults == faults
    assert "1.0 MB" in run("explain", path, code=1)
    expected = f"torch-ckpt: {path} cannot be loaded completely: {', '.join(faults)}\n"
    assert run.err == expected
    assert run.json("explain", path, code=1)["faults"] == faults


def test_the_command_prints_a_line_for_each_rank(tmp_path: Path, run: Run) -> None:
    lines = run("explain", checkpoint(tmp_path, [MB, MB])).splitlines()
    assert lines[0].split()[:3] == ["RANK", "RECORDS", "BYTES"]
    assert [line.split()[0] for line in lines[1:3]] == ["0", "1"]
