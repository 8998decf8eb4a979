"""The command line: ``ls``, errors and wrong arguments."""

import errno
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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
from tests.fault_hooks import failing
from torch_ckpt import cli
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


def ls_json(capsys: pytest.CaptureFixture[str], directory: Path) -> dict[str, Any]:
    assert cli.main(["ls", "--json", str(directory)]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def fails_with_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Runs a command that must exit with 2 and one line on stderr, which it returns."""
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, torch_ckpt.FileSystemWriter])
def test_ls_lists_what_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], writer: type[dcp.FileSystemWriter]
) -> None:
    save(tmp_path, writer(tmp_path))
    items = {item["name"]: item for item in ls_json(capsys, tmp_path)["items"]}
    assert list(items) == ["ids", "scalar", "step", "weight"]
    assert (items["weight"]["dtype"], items["weight"]["shape"]) == ("float32", [3, 5])
    assert (items["ids"]["dtype"], items["ids"]["shape"]) == ("int64", [7])
    assert (items["scalar"]["dtype"], items["scalar"]["shape"]) == ("bfloat16", [])
    assert (items["step"]["kind"], items["step"]["dtype"]) == ("bytes", None)
    assert all(item["stored_bytes"] > 0 for item in items.values())


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, torch_ckpt.FileSystemWriter])
def test_ls_counts_every_record_in_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], writer: type[dcp.FileSystemWriter]
) -> None:
    save(tmp_path, writer(tmp_path))
    listing = ls_json(capsys, tmp_path)
    used = [file for file in listing["files"] if file["records"]]
    assert sum(file["records"] for file in used) == len(listing["items"])
    assert {file["state"] for file in used} == {"ok"}


def test_ls_table_aligns_its_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(tmp_path, two_shards(tmp_path))
    assert cli.main(["ls", str(tmp_path)]) == 0
    header, *rows, blank = capsys.readouterr().out.splitlines()[:4]
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


def test_ls_total_counts_bytes_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(tmp_path, two_shards(tmp_path))
    (tmp_path / "__2_0.distcp").write_bytes(bytes(5000))
    total = ls_json(capsys, tmp_path)["total"]
    metadata_bytes = (tmp_path / ".metadata").stat().st_size
    assert (total["tensors"], total["bytes_items"], total["files"]) == (1, 1, 2)
    assert total["parameters"] == 16
    assert total["disk_bytes"] == 110 + 100 + metadata_bytes
    assert cli.main(["ls", str(tmp_path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    pattern = (
        r"total: 1 tensor, 16 parameters, 1 object, 2 files, .* on disk, "
        r"committed \d{4}-\d\d-\d\d .*"
    )
    assert re.fullmatch(pattern, last)


def test_ls_adds_up_parameters_and_bytes_by_top_level_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"model": {"a": torch.zeros(3, 500), "b": torch.zeros(7)}, "step": 1, "note": "x"}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    keys = {part["key"]: part for part in ls_json(capsys, tmp_path)["total"]["keys"]}
    assert list(keys) == ["model", "note", "step"]
    model = keys["model"]
    assert (model["tensors"], model["objects"], model["parameters"]) == (2, 0, 1507)
    assert model["stored_bytes"] > 4 * 1507
    assert cli.main(["ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.startswith("KEY"))
    assert header.split() == ["KEY", "TENSORS", "OBJECTS", "PARAMETERS", "STORED"]
    assert any(re.fullmatch(r"model +2 +0 +1,507 +\d.* kB", line) for line in lines)


@pytest.mark.parametrize("form", [[], ["--files"]], ids=["items", "files"])
def test_ls_lists_the_names_that_match_a_pattern(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: list[str]
) -> None:
    commit(tmp_path, two_shards(tmp_path))
    (tmp_path / "__1_0.distcp").unlink()
    # The missing file belongs to another name.
    assert cli.main(["ls", str(tmp_path), "layers.9.*", *form]) == 0
    output = capsys.readouterr().out
    assert "total: 0 tensors, 0 parameters, 1 object, 1 file, " in output
    assert "layers.10" not in output
    assert "__1_0.distcp" not in output


def test_ls_of_a_pattern_without_a_match_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(tmp_path, two_shards(tmp_path))
    message = fails_with_one_sentence(capsys, ["ls", str(tmp_path), "head.*"])
    assert "no name matches head.*" in message


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"torch_ckpt {torch_ckpt.__version__}\n"


def test_ls_adds_up_the_shards_of_an_item(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(tmp_path, two_shards(tmp_path))
    note, weight = ls_json(capsys, tmp_path)["items"]
    assert (weight["shards"], weight["stored_shards"], weight["stored_bytes"]) == (2, 2, 200)
    assert (note["shards"], note["stored_shards"], note["stored_bytes"]) == (1, 1, 10)


def test_ls_files_shows_each_file_and_its_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(tmp_path, two_shards(tmp_path))
    (tmp_path / "__10_0.distcp").write_bytes(bytes(5000))
    assert cli.main(["ls", "--files", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.split(r" {2,}", lines[0]) == ["FILE", "RECORDS", "STORED", "ON DISK", "STATE"]
    assert re.split(r" {2,}", lines[1]) == ["__0_0.distcp", "2", "110 B", "110 B", "ok"]
    assert re.split(r" {2,}", lines[2]) == ["__1_0.distcp", "1", "100 B", "100 B", "ok"]
    assert re.split(r" {2,}", lines[3]) == ["__10_0.distcp", "0", "0 B", "5.0 kB", "unreferenced"]


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [("__0_0.distcp", bytes(109), "too short"), ("__1_0.distcp", None, "missing")],
)
def test_ls_reports_files_that_cannot_hold_their_records(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes | None,
    fault: str,
) -> None:
    commit(tmp_path, two_shards(tmp_path))
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert cli.main(["ls", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert "layers.10.w" in output.out
    assert f"cannot be loaded completely: {name} ({fault})\n" in output.err


def test_ls_reports_shards_that_were_never_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = two_shards(tmp_path)
    del metadata.storage_data[MetadataIndex("layers.10.w", torch.Size([2, 0]))]
    commit(tmp_path, metadata)
    assert cli.main(["ls", str(tmp_path)]) == 1
    assert "layers.10.w (1 of 2 shards stored)" in capsys.readouterr().err


@pytest.mark.parametrize("outside", ["/etc/hostname", "../outside.distcp"])
def test_ls_refuses_files_outside_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outside: str
) -> None:
    (tmp_path / "outside.distcp").write_bytes(bytes(1000))
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    metadata = two_shards(directory)
    metadata.storage_data[MetadataIndex("layers.9.note")] = _StorageInfo(outside, 0, 10)
    commit(directory, metadata)
    message = fails_with_one_sentence(capsys, ["ls", str(directory)])
    assert f"layers.9.note: the metadata refers to {outside!r}" in message


def test_ls_does_not_follow_a_link_that_replaced_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(tmp_path, two_shards(tmp_path))
    (tmp_path / "__1_0.distcp").rename(tmp_path / "real")
    (tmp_path / "__1_0.distcp").symlink_to("real")
    assert cli.main(["ls", "--files", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert re.search(r"__1_0\.distcp .* unreadable", output.out)
    assert "__1_0.distcp (unreadable)" in output.err


def test_ls_does_not_report_a_system_error_as_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(tmp_path, two_shards(tmp_path))
    file = next(tmp_path.glob("*.distcp"))
    with failing("openat2", errno.EMFILE, file):
        message = fails_with_one_sentence(capsys, ["ls", str(tmp_path)])
    assert message.startswith(f"torch-ckpt: {file}: ")
    assert "Too many open files" in message


def test_ls_lists_a_dangling_link_as_unreferenced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(tmp_path, two_shards(tmp_path))
    (tmp_path / "__9_0.distcp").symlink_to("nowhere")
    states = {file["name"]: file["state"] for file in ls_json(capsys, tmp_path)["files"]}
    assert states["__9_0.distcp"] == "unreferenced"


def test_ls_escapes_control_characters_in_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = two_shards(tmp_path)
    metadata.state_dict_metadata["\x1b[2Jtitle\n"] = BytesStorageMetadata()
    commit(tmp_path, metadata)
    cli.main(["ls", str(tmp_path)])
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err
    assert r"\x1b[2Jtitle\n" in output.out


def test_ls_of_an_empty_state_prints_header_and_total(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(tmp_path, Metadata(state_dict_metadata={}))
    assert cli.main(["ls", str(tmp_path)]) == 0
    assert "total: 0 tensors, 0 parameters, 0 objects, 0 files" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps({"a": 1})])
def test_damaged_metadata_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    assert ".metadata" in fails_with_one_sentence(capsys, ["ls", str(tmp_path)])


def test_metadata_with_fields_of_wrong_types_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(tmp_path, Metadata(state_dict_metadata={}, storage_data={"weight": 3}))
    assert "storage_data has a key" in fails_with_one_sentence(capsys, ["ls", str(tmp_path)])


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
        [sys.executable, "-m", "torch_ckpt", "ls", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith(b"NAME")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141


def test_a_pipe_that_is_closed_after_the_last_line_keeps_the_exit_code(tmp_path: Path) -> None:
    commit(tmp_path, two_shards(tmp_path))
    next(tmp_path.glob("*.distcp")).unlink()
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torch_ckpt", "ls", str(tmp_path)]
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
def test_commands_on_directories_refuse_urls(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([argument.replace("URL", "s3://bucket/run") for argument in arguments])
    assert ended.value.code == 2
    assert "only steps, gc, delete, pin and unpin accept URLs" in capsys.readouterr().err


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
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
