"""``verify``: it finds and names all damage, and only damage."""

from __future__ import annotations

import errno
import os
import pickle
import random
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
from tests.fault_hooks import failing
from tests.forked import in_fresh_process
from tests.metadata import read_metadata
from tests.support import (
    DTYPES,
    data_files,
    flip_bit,
    place_of,
    random_tensor,
    save,
    stock_save,
)
from tests.verified_checkpoints import STATE, payload_offset, place
from torch_ckpt import cli
from torch_ckpt._base.progress import Progress
from torch_ckpt.inspection.diff import diff
from torch_ckpt.inspection.show import show
from torch_ckpt.inspection.verify import VerifyReport

MIB = 1 << 20


def change(path: Path, edit: Callable[[Metadata], None]) -> None:
    metadata = read_metadata(path)
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def damaged_names(report: VerifyReport) -> list[str | None]:
    return sorted({damage.name for damage in report.damaged}, key=str)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ours")
    save(STATE, path, thread_count=2)
    return path


@pytest.fixture(scope="module")
def stocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stocks")
    stock_save(STATE, path, thread_count=2)
    return path


@pytest.fixture(params=["ours", "stocks"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Makes a copy to damage."""
    path = tmp_path / "checkpoint"
    shutil.copytree(request.getfixturevalue(request.param), path)
    return path


@pytest.fixture
def our_copy(ours: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ours, tmp_path / "checkpoint"))


# --- sound checkpoints ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"direct_io": True},
        {"direct_io": False},
        {},
        {"thread_count": 16, "max_inflight_bytes": MIB},
    ],
    ids=str,
)
def test_an_intact_checkpoint_has_no_damage(checkpoint: Path, options: dict[str, Any]) -> None:
    report = torch_ckpt.verify(checkpoint, **options)
    assert report.ok, str(report)
    assert not report.unverifiable
    assert not report.unreferenced
    assert report.records == len(STATE)
    assert report.bytes == sum(file.stat().st_size for file in data_files(checkpoint))
    assert str(report).endswith(": no damage found")


SOUND: dict[str, dict[str, Any]] = {
    "every dtype": {str(dtype): random_tensor((300, 40), dtype) for dtype in DTYPES},
    "empty values": {"a": torch.empty(0), "b": torch.empty(3, 0, 2), "c": "", "d": b"", "e": []},
    "nothing": {},
}


@pytest.mark.parametrize("write", [save, stock_save])
@pytest.mark.parametrize("values", SOUND)
def test_a_sound_state_has_no_damage(
    tmp_path: Path, values: str, write: Callable[..., Any]
) -> None:
    write(SOUND[values], tmp_path)
    report = torch_ckpt.verify(tmp_path)
    assert report.ok, str(report)
    assert (report.records, report.unverifiable) == (len(SOUND[values]), [])


@pytest.mark.parametrize("write", [save, stock_save])
def test_values_that_only_torch_reads_are_verified(
    tmp_path: Path, write: Callable[..., Any]
) -> None:
    quantized = torch.quantize_per_tensor(torch.randn(300, 300), 0.1, 0, torch.quint8)
    write({"quantized": quantized}, tmp_path)
    report = torch_ckpt.verify(tmp_path)
    assert report.ok, str(report)
    assert not report.unverifiable
    file, offset, length = place(tmp_path, "quantized")
    flip_bit(file, offset + length // 2, 3)
    assert damaged_names(torch_ckpt.verify(tmp_path)) == ["quantized"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thread_count": 0}, "thread_count must be at least 1"),
        ({"max_inflight_bytes": 1000}, "max_inflight_bytes must be at least"),
        ({"direct_io": "yes"}, "direct_io must be"),
    ],
)
def test_options_out_of_range_are_refused(
    ours: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        torch_ckpt.verify(ours, **options)


def test_progress_reaches_the_total(ours: Path) -> None:
    seen: list[Progress] = []
    report = torch_ckpt.verify(ours, progress=seen.append)
    done = [progress.bytes_done for progress in seen]
    assert done == sorted(done)
    assert done[-1] == report.bytes
    assert {progress.bytes_planned for progress in seen} == {report.bytes}


# --- bits ----------------------------------------------------------------------------------------


def missed(path: Path, places: list[tuple[str, Path, int, int]], tries: int) -> list[Any]:
    """Flips bits one at a time. Returns those that are not reported for their record only."""
    choice = random.Random(7)
    wrong = []
    for _ in range(tries):
        # Records first, so that small ones are covered.
        name, file, offset, length = choice.choice(places)
        byte, bit = choice.randrange(length), choice.randrange(8)
        flip_bit(file, offset + byte, bit)
        report = torch_ckpt.verify(path)
        if damaged_names(report) != [name] or report.damaged[0].file != file.name:
            wrong.append((name, byte, bit, str(report)))
        flip_bit(file, offset + byte, bit)
    return wrong


def test_every_flipped_bit_of_ours_is_found_and_named(our_copy: Path) -> None:
    assert missed(our_copy, [(name, *place(our_copy, name)) for name in sorted(STATE)], 300) == []
    assert torch_ckpt.verify(our_copy).ok


def test_every_flipped_bit_of_a_stock_payload_is_found(stocks: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(stocks, tmp_path / "checkpoint"))
    payloads = [
        (name, place(path, name)[0], payload_offset(path, name), STATE[name].nbytes)
        for name in ("small", "blocks", "many blocks", "scalar")
    ]
    assert missed(path, payloads, 200) == []


def test_the_damaged_block_is_reported(our_copy: Path) -> None:
    begin = payload_offset(our_copy, "many blocks")
    file, _offset, _length = place(our_copy, "many blocks")
    flip_bit(file, begin + 5 * (16 << 10) + 1234, 0)
    (damage,) = torch_ckpt.verify(our_copy).damaged
    assert (damage.name, damage.file) == ("many blocks", file.name)
    assert (damage.offset, damage.bytes) == (begin + 5 * (16 << 10), 16 << 10)
    assert "the checkpoint's metadata has 0x" in damage.what


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("note", b"quick brown"),
        ("long note", b"lazy dog"),
        ("blocks", b"torch._utils"),
        ("blocks", b"little"),
        ("blocks", b"PK\5\6"),
        ("blocks", b"PK\1\2"),
    ],
    ids=str,
)
def test_a_damaged_object_or_archive_is_named(checkpoint: Path, name: str, part: bytes) -> None:
    file, offset, _length = place(checkpoint, name)
    flip_bit(file, file.read_bytes().index(part, offset), 1)
    assert damaged_names(torch_ckpt.verify(checkpoint)) == [name]


def test_a_damaged_checksum_table_is_reported_for_its_file(our_copy: Path) -> None:
    file = place(our_copy, "blocks")[0].name

    def damage(metadata: Any) -> None:
        tables = metadata.torch_ckpt["checksums"]
        tables[file] = tables[file][:-1] + b"?"

    change(our_copy, damage)
    report = torch_ckpt.verify(our_copy)
    (found,) = report.damaged
    assert (found.name, found.file, found.offset) == (None, file, None)
    assert "the metadata's checksums for this file are damaged" in found.what


# --- files ---------------------------------------------------------------------------------------


def test_a_missing_file_is_named_with_all_its_values(checkpoint: Path) -> None:
    file = place(checkpoint, "blocks")[0]
    names = [name for name in STATE if place(checkpoint, name)[0] == file]
    file.unlink()
    report = torch_ckpt.verify(checkpoint)
    ((missing, lost),) = report.missing
    assert missing == file.name
    assert sorted(lost) == sorted(names)
    assert not report.damaged
    assert report.records == len(STATE) - len(names)


def test_a_line_names_only_some_of_many_values_and_the_report_has_all(
    tmp_path: Path, run: Run
) -> None:
    save({f"t{n:02}": torch.ones(3) for n in range(20)}, tmp_path / "c")
    (file,) = data_files(tmp_path / "c")
    file.unlink()
    for name in map(str, range(20)):
        (tmp_path / "c" / name).touch()
    missing, others, _verdict = run("verify", tmp_path / "c", code=1).splitlines()
    assert missing.startswith(f"missing: {file.name}, which holds t00, t01, ")
    assert missing.endswith(", t07 and 12 more")
    assert others.endswith(" and 12 more")
    assert len(run.json("verify", tmp_path / "c", code=1)["missing"][0]["names"]) == 20


def test_records_behind_the_end_of_a_truncated_file_are_named(checkpoint: Path) -> None:
    file = place(checkpoint, "blocks")[0]
    cut = file.stat().st_size - 100
    lost = sorted(
        name for name in STATE if (p := place(checkpoint, name))[0] == file and p[1] + p[2] > cut
    )
    os.truncate(file, cut)
    report = torch_ckpt.verify(checkpoint)
    assert damaged_names(report) == lost
    assert all(f"the file ends at byte {cut}" in damage.what for damage in report.damaged)
    assert report.records == len(STATE) - len(lost)


def test_bytes_behind_the_last_record_are_damage(checkpoint: Path) -> None:
    file = place(checkpoint, "blocks")[0]
    before = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"xyz")
    report = torch_ckpt.verify(checkpoint)
    (damage,) = report.damaged
    assert (damage.name, damage.file, damage.offset, damage.bytes) == (None, file.name, before, 3)
    assert not report.ok
    assert damage.what == "the file is longer than its records"


@pytest.mark.parametrize(
    ("write", "shape_of_b"),
    # Stock torch's checkpoints have no checksum that would distinguish files of one shape.
    [(save, (30, 40)), (save, (40, 30)), (stock_save, (30, 40))],
    ids=["ours", "ours of one shape", "stock's"],
)
def test_swapped_files_are_detected(
    tmp_path: Path, write: Callable[..., Any], shape_of_b: tuple[int, int]
) -> None:
    a, b = random_tensor((40, 30), torch.float32), random_tensor(shape_of_b, torch.float32, seed=1)
    write({"a": a, "b": b}, tmp_path, thread_count=2)
    one, two = data_files(tmp_path)
    contents = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(contents)
    assert damaged_names(torch_ckpt.verify(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda file: file.symlink_to("real"), "contains a symbolic link"),
        (os.mkfifo, "not a regular file"),
        (Path.mkdir, "not a regular file"),
    ],
    ids=["link", "fifo", "directory"],
)
def test_a_path_that_is_not_a_file_is_reported(
    checkpoint: Path, make: Callable[[Path], None], what: str
) -> None:
    file = place(checkpoint, "blocks")[0]
    file.rename(checkpoint / "real")
    make(file)
    (damage,) = torch_ckpt.verify(checkpoint).damaged
    assert (damage.name, damage.file) == (None, file.name)
    assert what in damage.what


def test_an_io_error_is_not_damage(ours: Path, run: Run) -> None:
    torch_ckpt.verify(ours)  # for modules that are imported late
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    outcomes = []
    try:
        for left in range(64):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + left, limits[1]))
            run("verify", ours, code=None)
            outcomes.append(run.code)
            assert ("damaged" in run.out, "missing" in run.out) == (False, False)
            assert ("Too many open files" in run.err) is (run.code == 2)
            if run.code == 0:
                break
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (outcomes[0], outcomes[-1], set(outcomes)) == (2, 0, {0, 2})


def test_unreadable_files_are_named_and_damage_takes_precedence(checkpoint: Path, run: Run) -> None:
    file = place(checkpoint, "blocks")[0]
    with failing("openat2", errno.EACCES, file):
        report = torch_ckpt.verify(checkpoint)
        assert [(unread.name, unread.file) for unread in report.unread] == [(None, file.name)]
        assert (report.ok, report.has_damage) == (False, False)
        run("verify", checkpoint, code=2)
    reason = "the file cannot be opened: openat2 failed: Permission denied"
    assert f"not read: {file.name}: {reason}" in run.out
    assert f"was not read completely: {reason}" in run.err
    next(other for other in data_files(checkpoint) if other != file).unlink()
    with failing("openat2", errno.EACCES, file):
        run("verify", checkpoint, code=1)


def test_unreferenced_files_are_listed_and_are_not_damage(checkpoint: Path) -> None:
    (checkpoint / "__7_0.distcp").write_bytes(b"of a save that died")
    (checkpoint / "readme").write_text("hello")
    (checkpoint / "folder").mkdir()
    report = torch_ckpt.verify(checkpoint)
    assert report.ok
    assert report.unreferenced == ["__7_0.distcp", "readme"]


def at(**fields: Any) -> Callable[[Metadata], None]:
    return lambda metadata: vars(place_of(metadata, "small")).update(fields)


def of_another_type(metadata: Metadata) -> None:
    metadata.state_dict_metadata = [1]  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (at(relative_path="../outside"), torch_ckpt.Unsafe, r"small: .*'\.\./outside'"),
        (at(offset=-1), torch_ckpt.Corrupt, "small: the metadata has an invalid location"),
        (of_another_type, torch_ckpt.Corrupt, "state_dict_metadata is a list"),
    ],
    ids=["a file elsewhere", "an impossible offset", "a field of another type"],
)
def test_invalid_metadata_is_refused(
    checkpoint: Path, edit: Callable[[Metadata], None], error: type[Exception], message: str
) -> None:
    change(checkpoint, edit)
    with pytest.raises(error, match=message):
        torch_ckpt.verify(checkpoint)


# --- contents of the metadata --------------------------------------------------------------------


def test_a_shape_that_differs_from_the_record_is_reported(checkpoint: Path) -> None:
    def reshape(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["small"]
        entry.size = torch.Size([3, 40])
        (chunk,) = entry.chunks
        entry.chunks = [type(chunk)(chunk.offsets, entry.size)]

    change(checkpoint, reshape)
    (damage,) = torch_ckpt.verify(checkpoint).damaged
    what = "holds a tensor with shape [40, 3], but the metadata describes one with shape [3, 40]"
    assert damage.name == "small"
    assert what in damage.what


class Casting(dcp.DefaultSavePlanner):
    """Stores another dtype than its plan and the metadata have."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object).to(torch.bfloat16)


@pytest.mark.parametrize("writer", [torch_ckpt.FileSystemWriter, dcp.FileSystemWriter])
def test_another_dtype_is_reported_unless_a_table_records_it(tmp_path: Path, writer: Any) -> None:
    state = {"weight": random_tensor((40, 30), torch.float32)}
    dcp.save(state, storage_writer=writer(tmp_path), planner=Casting(), no_dist=True)
    found = [damage.what for damage in torch_ckpt.verify(tmp_path).damaged]
    what = "holds a tensor with dtype bfloat16, but the metadata describes one with dtype float32"
    assert [what in text for text in found] == [True] * (writer is dcp.FileSystemWriter)


@pytest.mark.parametrize(
    "names", [{"small"}, {"note"}, set(STATE)], ids=["tensor", "object", "all"]
)
def test_values_without_a_location_are_reported(checkpoint: Path, names: set[str]) -> None:
    def forget(metadata: Metadata) -> None:
        kept = {i: info for i, info in metadata.storage_data.items() if i.fqn not in names}
        metadata.storage_data = kept or None

    change(checkpoint, forget)
    report = torch_ckpt.verify(checkpoint)
    assert {name for name, _ in report.incomplete} == names
    assert all("no location" in what for _, what in report.incomplete)
    assert not report.damaged
    assert not report.ok


@pytest.mark.parametrize(
    ("chunks", "what"),
    [
        ([((0, 0), (20, 3)), ((21, 0), (19, 3))], "no shard covers the element at [20, 0]"),
        # As many elements as in the tensor, but some are duplicates.
        ([((0, 0), (20, 3)), ((10, 0), (20, 3))], "no shard covers the element at [30, 0]"),
        ([], "the tensor has no shards"),
    ],
)
def test_shards_that_do_not_cover_their_tensor_are_reported(
    our_copy: Path, chunks: list[Any], what: str
) -> None:
    def cut(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["small"]
        kind = type(entry.chunks[0])
        entry.chunks = [kind(torch.Size(o), torch.Size(s)) for o, s in chunks]

    change(our_copy, cut)
    messages = [text for name, text in torch_ckpt.verify(our_copy).incomplete if name == "small"]
    assert any(text.startswith(what) for text in messages), messages


def staircase(rows: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns two shards for each row of a square, but not the square's last element."""
    shards = []
    for row in range(rows):
        shards.append(((row, 0), (1, row)))
        shards.append(((row, row), (1, rows - row)))
    return shards[1:-1]


def test_a_gap_among_thousands_of_shards_is_found_by_verify_show_and_diff(tmp_path: Path) -> None:
    rows = 2500
    chunks, places = [], {}
    for number, (offsets, sizes) in enumerate(staircase(rows)):
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        index = MetadataIndex("t", torch.Size(offsets))
        places[index] = _StorageInfo("data.distcp", 64 * number, 64)
    properties = TensorProperties(torch.float32)
    stored = TensorStorageMetadata(properties, torch.Size([rows, rows]), chunks)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"t": stored}, storage_data=places)))
    (tmp_path / "data.distcp").write_bytes(bytes(64 * len(chunks)))
    gap = f"no shard covers the element at [{rows - 1}, {rows - 1}]"
    assert torch_ckpt.verify(tmp_path).incomplete == [("t", gap)]
    ((name, what),) = show(tmp_path).damaged
    assert name == "t"
    assert gap in what
    with pytest.raises(torch_ckpt.Corrupt, match=re.escape(f"t: {gap}")):
        diff(tmp_path, tmp_path)


def test_missing_checksums_are_reported_and_are_not_damage(tmp_path: Path) -> None:
    state = {"small": STATE["small"], "blocks": STATE["blocks"], "note": "note"}
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        stock_save(state, tmp_path)
    finally:
        torch.serialization.set_crc32_options(before)
    report = torch_ckpt.verify(tmp_path)
    assert report.ok
    assert report.unverifiable == ["blocks", "note", "small"]
    assert "but some records lack checksums" in str(report)


def test_checkpoints_of_single_ranks_are_verified(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    dcp.save(STATE, storage_writer=writer, no_dist=True, use_collectives=False)
    assert not (tmp_path / ".metadata").exists()
    report = torch_ckpt.verify(tmp_path)
    assert report.ok
    assert report.records == len(STATE)
    assert not report.unreferenced


# --- the command line ----------------------------------------------------------------------------


def test_the_command_prints_a_summary(ours: Path, run: Run) -> None:
    (line,) = run("verify", ours).splitlines()
    assert run.err == ""
    assert line.startswith(f"{ours}: 9 records, ")
    assert line.endswith("GB/s: no damage found")


def test_the_command_lists_all_damage(our_copy: Path, run: Run) -> None:
    for name in ("small", "blocks"):
        flip_bit(place(our_copy, name)[0], payload_offset(our_copy, name), 0)

    lines = run("verify", our_copy, "--threads", "2", code=1).splitlines()
    assert sorted(line.split(": ")[1] for line in lines[:-1]) == ["blocks", "small"]
    assert lines[-1].endswith("2 locations damaged")


def test_the_command_can_print_only_damage(our_copy: Path, run: Run) -> None:
    assert run("verify", "--quiet", our_copy) == ""
    flip_bit(place(our_copy, "small")[0], payload_offset(our_copy, "small"), 0)
    (line,) = run("verify", "--quiet", our_copy, code=1).splitlines()
    assert line.startswith("damaged: small: ")


def test_the_command_prints_json(our_copy: Path, run: Run) -> None:
    data_files(our_copy)[0].unlink()
    document = run.json("verify", our_copy, code=1)
    assert document["ok"] is False
    assert [entry["file"] for entry in document["missing"]] == ["__0_0.distcp"]


def verify_and_diff(path: str) -> tuple[int, int, bool]:
    """Returns the exit codes of verify and diff, and True if CUDA was initialized."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    codes = cli.main(["verify", path]), cli.main(["diff", path, path])
    return *codes, torch.cuda.is_initialized()


def test_the_commands_do_not_initialize_cuda(ours: Path) -> None:
    assert in_fresh_process(verify_and_diff, str(ours)) == (0, 0, False)
