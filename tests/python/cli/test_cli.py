"""The command line: ``ls``, errors and wrong arguments."""

import errno
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import torch_ckpt
from tests.commands import Run
from tests.fault_hooks import failing
from torch_ckpt._base.formatting import size

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(directory: Path, writer: dcp.StorageWriter) -> None:
    state = {
        "weight": torch.zeros(3, 5),
        "ids": torch.zeros(7, dtype=torch.int64),
        "scalar": torch.tensor(1.0, dtype=torch.bfloat16),
        "step": 12,
    }
    dcp.save(state, checkpoint_id=directory, storage_writer=writer, no_dist=True)


def two_shards(directory: Path) -> Metadata:
    """Describes one tensor in two shards of 100 bytes, and an object of 10 bytes; writes files."""
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 4])) for row in (0, 2)]
    (directory / "__0_0.distcp").write_bytes(bytes(110))
    (directory / "__1_0.distcp").write_bytes(bytes(100))
    return Metadata(
        state_dict_metadata={
            "layers.10.w": TensorStorageMetadata(
                TensorProperties(dtype=torch.float32), torch.Size([4, 4]), chunks
            ),
            "layers.9.note": BytesStorageMetadata(),
        },
        storage_data={
            MetadataIndex("layers.10.w", torch.Size([0, 0])): _StorageInfo("__0_0.distcp", 10, 100),
            MetadataIndex("layers.10.w", torch.Size([2, 0])): _StorageInfo("__1_0.distcp", 0, 100),
            MetadataIndex("layers.9.note"): _StorageInfo("__0_0.distcp", 0, 10),
        },
    )


def commit(directory: Path, metadata: object) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    commit(tmp_path, two_shards(tmp_path))
    return tmp_path


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, torch_ckpt.FileSystemWriter])
def test_ls_lists_what_was_saved(
    tmp_path: Path, run: Run, writer: type[dcp.FileSystemWriter]
) -> None:
    save(tmp_path, writer(tmp_path))
    items = {item["name"]: item for item in run.json("ls", tmp_path)["items"]}
    assert list(items) == ["ids", "scalar", "step", "weight"]
    assert (items["weight"]["dtype"], items["weight"]["shape"]) == ("float32", [3, 5])
    assert (items["ids"]["dtype"], items["ids"]["shape"]) == ("int64", [7])
    assert (items["scalar"]["dtype"], items["scalar"]["shape"]) == ("bfloat16", [])
    assert (items["step"]["kind"], items["step"]["dtype"]) == ("bytes", None)
    assert all(item["stored_bytes"] > 0 for item in items.values())


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, torch_ckpt.FileSystemWriter])
def test_ls_counts_every_record_in_its_file(
    tmp_path: Path, run: Run, writer: type[dcp.FileSystemWriter]
) -> None:
    save(tmp_path, writer(tmp_path))
    listing = run.json("ls", tmp_path)
    used = [file for file in listing["files"] if file["records"]]
    assert sum(file["records"] for file in used) == len(listing["items"])
    assert {file["state"] for file in used} == {"ok"}


def test_ls_table_aligns_its_columns(stored: Path, run: Run) -> None:
    header, *rows, blank = run("ls", stored).splitlines()[:4]
    assert header.split() == ["NAME", "DTYPE", "SHAPE", "SHARDS", "STORED", "FILES"]
    assert [row.split()[0] for row in rows] == ["layers.9.note", "layers.10.w"]
    assert blank == ""
    for left in ("DTYPE", "SHAPE", "FILES"):
        column = header.index(left)
        assert all(row[column - 1] == " " and row[column] != " " for row in rows)
    for right in ("SHARDS", "STORED"):
        column = header.index(right) + len(right) - 1
        assert all(row[column] != " " and row[column + 1] == " " for row in rows)
    assert rows[1].split(maxsplit=1)[1].split("  ")[-1] == "__0_0.distcp, __1_0.distcp"


def test_ls_total_counts_bytes_on_disk(stored: Path, run: Run) -> None:
    (stored / "__2_0.distcp").write_bytes(bytes(5000))
    total = run.json("ls", stored)["total"]
    metadata_bytes = (stored / ".metadata").stat().st_size
    assert (total["tensors"], total["bytes_items"], total["files"]) == (1, 1, 2)
    assert total["parameters"] == 16
    assert total["disk_bytes"] == 110 + 100 + metadata_bytes
    last = run("ls", stored).splitlines()[-1]
    pattern = (
        r"total: 1 tensor, 16 parameters, 1 object, 2 files, .* on disk, "
        r"committed \d{4}-\d\d-\d\d .*"
    )
    assert re.fullmatch(pattern, last)


def test_ls_adds_up_parameters_and_bytes_by_top_level_key(tmp_path: Path, run: Run) -> None:
    state = {"model": {"a": torch.zeros(3, 500), "b": torch.zeros(7)}, "step": 1, "note": "x"}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    keys = {part["key"]: part for part in run.json("ls", tmp_path)["total"]["keys"]}
    assert list(keys) == ["model", "note", "step"]
    model = keys["model"]
    assert (model["tensors"], model["objects"], model["parameters"]) == (2, 0, 1507)
    assert model["stored_bytes"] > 4 * 1507
    lines = run("ls", tmp_path).splitlines()
    header = next(line for line in lines if line.startswith("KEY"))
    assert header.split() == ["KEY", "TENSORS", "OBJECTS", "PARAMETERS", "STORED"]
    assert any(re.fullmatch(r"model +2 +0 +1,507 +\d.* kB", line) for line in lines)


@pytest.mark.parametrize("form", [[], ["--files"]], ids=["items", "files"])
def test_ls_lists_the_names_that_match_a_pattern(stored: Path, run: Run, form: list[str]) -> None:
    (stored / "__1_0.distcp").unlink()
    # The missing file belongs to another name.
    output = run("ls", stored, "layers.9.*", *form)
    assert "total: 0 tensors, 0 parameters, 1 object, 1 file, " in output
    assert "layers.10" not in output
    assert "__1_0.distcp" not in output


def test_ls_of_a_pattern_without_a_match_is_an_error(stored: Path, run: Run) -> None:
    assert "no name matches head.*" in run.refused("ls", stored, "head.*")


def test_the_version_is_printed(run: Run) -> None:
    assert run("--version") == f"torch_ckpt {torch_ckpt.__version__}\n"


def test_ls_adds_up_the_shards_of_an_item(stored: Path, run: Run) -> None:
    note, weight = run.json("ls", stored)["items"]
    assert (weight["shards"], weight["stored_shards"], weight["stored_bytes"]) == (2, 2, 200)
    assert (note["shards"], note["stored_shards"], note["stored_bytes"]) == (1, 1, 10)


def test_ls_files_shows_each_file_and_its_state(stored: Path, run: Run) -> None:
    (stored / "__10_0.distcp").write_bytes(bytes(5000))
    lines = run("ls", "--files", stored).splitlines()
    assert re.split(r" {2,}", lines[0]) == ["FILE", "RECORDS", "STORED", "ON DISK", "STATE"]
    assert re.split(r" {2,}", lines[1]) == ["__0_0.distcp", "2", "110 B", "110 B", "ok"]
    assert re.split(r" {2,}", lines[2]) == ["__1_0.distcp", "1", "100 B", "100 B", "ok"]
    assert re.split(r" {2,}", lines[3]) == ["__10_0.distcp", "0", "0 B", "5.0 kB", "unreferenced"]


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [("__0_0.distcp", bytes(109), "too short"), ("__1_0.distcp", None, "missing")],
)
def test_ls_reports_files_that_cannot_hold_their_records(
    stored: Path,
    run: Run,
    name: str,
    content: bytes | None,
    fault: str,
) -> None:
    (stored / name).unlink()
    if content is not None:
        (stored / name).write_bytes(content)
    run("ls", stored, code=1)
    assert "layers.10.w" in run.out
    assert f"cannot be loaded completely: {name} ({fault})\n" in run.err


def test_ls_reports_shards_that_were_never_stored(tmp_path: Path, run: Run) -> None:
    metadata = two_shards(tmp_path)
    del metadata.storage_data[MetadataIndex("layers.10.w", torch.Size([2, 0]))]
    commit(tmp_path, metadata)
    run("ls", tmp_path, code=1)
    assert "layers.10.w (1 of 2 shards stored)" in run.err


@pytest.mark.parametrize("outside", ["/etc/hostname", "../outside.distcp"])
def test_ls_refuses_files_outside_the_checkpoint(tmp_path: Path, run: Run, outside: str) -> None:
    (tmp_path / "outside.distcp").write_bytes(bytes(1000))
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    metadata = two_shards(directory)
    metadata.storage_data[MetadataIndex("layers.9.note")] = _StorageInfo(outside, 0, 10)
    commit(directory, metadata)
    assert f"layers.9.note: the metadata refers to {outside!r}" in run.refused("ls", directory)


def test_ls_does_not_follow_a_link_that_replaced_a_file(stored: Path, run: Run) -> None:
    (stored / "__1_0.distcp").rename(stored / "real")
    (stored / "__1_0.distcp").symlink_to("real")
    run("ls", "--files", stored, code=1)
    assert re.search(r"__1_0\.distcp .* unreadable", run.out)
    assert "__1_0.distcp (unreadable)" in run.err


def test_ls_does_not_report_a_system_error_as_damage(stored: Path, run: Run) -> None:
    file = next(stored.glob("*.distcp"))
    with failing("openat2", errno.EMFILE, file):
        message = run.refused("ls", stored)
    assert message.startswith(f"torch-ckpt: {file}: ")
    assert "Too many open files" in message


def test_ls_lists_a_dangling_link_as_unreferenced(stored: Path, run: Run) -> None:
    (stored / "__9_0.distcp").symlink_to("nowhere")
    states = {file["name"]: file["state"] for file in run.json("ls", stored)["files"]}
    assert states["__9_0.distcp"] == "unreferenced"


def test_ls_escapes_control_characters_in_names(tmp_path: Path, run: Run) -> None:
    metadata = two_shards(tmp_path)
    metadata.state_dict_metadata["\x1b[2Jtitle\n"] = BytesStorageMetadata()
    commit(tmp_path, metadata)
    run("ls", tmp_path, code=1)
    assert "\x1b" not in run.out + run.err
    assert r"\x1b[2Jtitle\n" in run.out


def test_ls_of_an_empty_state_prints_header_and_total(tmp_path: Path, run: Run) -> None:
    commit(tmp_path, Metadata(state_dict_metadata={}))
    assert "total: 0 tensors, 0 parameters, 0 objects, 0 files" in run("ls", tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps({"a": 1})])
def test_damaged_metadata_is_one_sentence(tmp_path: Path, run: Run, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    assert ".metadata" in run.refused("ls", tmp_path)


def test_metadata_with_fields_of_wrong_types_is_one_sentence(tmp_path: Path, run: Run) -> None:
    commit(tmp_path, Metadata(state_dict_metadata={}, storage_data={"weight": 3}))
    assert "storage_data has a key" in run.refused("ls", tmp_path)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (20_931_504, "20.9 MB"),
        (3 * 10**9, "3.0 GB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_sizes_are_written_for_people(count: int, text: str) -> None:
    assert size(count) == text


def test_module_runs_and_survives_a_closed_pipe(tmp_path: Path) -> None:
    metadata = two_shards(tmp_path)
    for number in range(3000):  # more than a pipe holds
        metadata.state_dict_metadata[f"filler.{number}"] = BytesStorageMetadata()
        index = MetadataIndex(f"filler.{number}")
        metadata.storage_data[index] = _StorageInfo("__0_0.distcp", 0, 0)
    commit(tmp_path, metadata)
    process = subprocess.Popen(
        [sys.executable, "-m", "torch_ckpt", "ls", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith(b"NAME")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141


def test_a_pipe_that_is_closed_after_the_last_line_keeps_the_exit_code(stored: Path) -> None:
    next(stored.glob("*.distcp")).unlink()
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torch_ckpt", "ls", stored]
    # Without buffering, the first line would already fail.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.run(command, stdout=writer, env=buffered, check=False)
    os.close(writer)
    assert process.returncode == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "URL"],
        ["show", "URL"],
        ["verify", "URL"],
        ["diff", "a", "URL"],
        ["convert", "URL", "b"],
        ["convert", "a", "URL"],
        ["doctor", "URL"],
    ],
    ids=" ".join,
)
def test_commands_on_directories_refuse_urls(run: Run, arguments: list[str]) -> None:
    words = [argument.replace("URL", "s3://bucket/run") for argument in arguments]
    assert "only steps, gc, delete, pin and unpin accept URLs" in run(*words, code=2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gc", "run", "--keep-last", "0"], "--keep-last: must be at least 1, got 0"),
        (["gc", "run", "--keep-every", "x"], "--keep-every: must be an integer, got 'x'"),
        (["gc", "run", "--keep-every-hours=-1"], "must be positive and finite, got '-1'"),
        (["show", "c", "--first=-1"], "--first: must be at least 0, got -1"),
        (["diff", "a", "b", "--atol", "x"], "--atol: must be a number, got 'x'"),
        (["diff", "a", "b", "--rtol=-1"], "--rtol: must be at least 0, got '-1'"),
        (["convert", "a", "b", "--max-shard-size", "5X"], "must be a size such as 5GB or 512MiB"),
        (["convert", "a", "b", "--max-shard-size", "0"], "must be at least 1 byte, got '0'"),
        (["doctor", "c", "--size", "1kB"], "--size: must be at least 32768 bytes, got '1kB'"),
    ],
)
def test_a_wrong_option_is_explained_in_a_sentence(
    run: Run, arguments: list[str], sentence: str
) -> None:
    assert sentence in run(*arguments, code=2)
