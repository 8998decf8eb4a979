"""The command line: ``ls``, exit codes, errors and wrong arguments."""

import errno
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
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
from tests.fault_hooks import before, failing
from tests.support import data_files, save, save_step
from torch_ckpt._base.formatting import size
from torch_ckpt.cli.arguments import build_parser, subcommands
from torch_ckpt.cli.output import ExitCode
from torch_ckpt.steps import LocalSteps

DOCUMENT = Path(__file__).parents[3] / "docs" / "cli.md"


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
def test_ls_lists_what_was_saved_and_counts_every_record_in_its_file(
    tmp_path: Path, run: Run, writer: type[dcp.FileSystemWriter]
) -> None:
    state = {
        "weight": torch.zeros(3, 5),
        "ids": torch.zeros(7, dtype=torch.int64),
        "scalar": torch.tensor(1.0, dtype=torch.bfloat16),
        "step": 12,
    }
    dcp.save(state, storage_writer=writer(tmp_path), no_dist=True)
    listing = run.json("ls", tmp_path)
    fields = ("name", "kind", "dtype", "shape")
    assert [tuple(item[field] for field in fields) for item in listing["items"]] == [
        ("ids", "tensor", "int64", [7]),
        ("scalar", "tensor", "bfloat16", []),
        ("step", "bytes", None, None),
        ("weight", "tensor", "float32", [3, 5]),
    ]
    assert all(item["stored_bytes"] > 0 for item in listing["items"])
    used = [file for file in listing["files"] if file["records"]]
    assert sum(file["records"] for file in used) == len(state)
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


def test_ls_adds_up_bytes_on_disk_and_the_shards_of_an_item(stored: Path, run: Run) -> None:
    (stored / "__2_0.distcp").write_bytes(bytes(5000))
    listing = run.json("ls", stored)
    total = listing["total"]
    metadata_bytes = (stored / ".metadata").stat().st_size
    assert (total["tensors"], total["bytes_items"], total["files"]) == (1, 1, 2)
    assert total["parameters"] == 16
    assert total["disk_bytes"] == 110 + 100 + metadata_bytes
    fields = ("shards", "stored_shards", "stored_bytes")
    counts = [tuple(item[field] for field in fields) for item in listing["items"]]
    assert counts == [(1, 1, 10), (2, 2, 200)]
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
    assert "no name matches head.*" in run.refused("ls", stored, "head.*", *form)
    (stored / "__1_0.distcp").unlink()
    # The missing file belongs to another name.
    output = run("ls", stored, "layers.9.*", *form)
    assert "total: 0 tensors, 0 parameters, 1 object, 1 file, " in output
    assert "layers.10" not in output
    assert "__1_0.distcp" not in output


def test_the_version_is_printed(run: Run) -> None:
    assert run("--version") == f"torch_ckpt {torch_ckpt.__version__}\n"


def test_ls_files_shows_each_file_and_its_state(stored: Path, run: Run) -> None:
    (stored / "__10_0.distcp").write_bytes(bytes(5000))
    (stored / "__11_0.distcp").symlink_to("nowhere")
    lines = [re.split(r" {2,}", line) for line in run("ls", "--files", stored).splitlines()]
    assert lines[0] == ["FILE", "RECORDS", "STORED", "ON DISK", "STATE"]
    assert lines[1] == ["__0_0.distcp", "2", "110 B", "110 B", "ok"]
    assert lines[2] == ["__1_0.distcp", "1", "100 B", "100 B", "ok"]
    assert lines[3] == ["__10_0.distcp", "0", "0 B", "5.0 kB", "unreferenced"]
    assert (lines[4][0], lines[4][-1]) == ("__11_0.distcp", "unreferenced")


@pytest.mark.parametrize(
    ("replace", "fault"),
    [
        (lambda file: file.write_bytes(bytes(99)), "too short"),
        (lambda file: None, "missing"),
        (lambda file: file.symlink_to("__0_0.distcp"), "unreadable"),
    ],
    ids=["too short", "missing", "a link"],
)
def test_ls_reports_files_that_cannot_hold_their_records(
    stored: Path, run: Run, replace: Callable[[Path], object], fault: str
) -> None:
    (stored / "__1_0.distcp").unlink()
    replace(stored / "__1_0.distcp")
    run("ls", "--files", stored, code=1)
    assert re.search(rf"__1_0\.distcp .* {fault}", run.out)
    assert f"cannot be loaded completely: __1_0.distcp ({fault})\n" in run.err


def test_ls_reports_shards_that_were_never_stored(tmp_path: Path, run: Run) -> None:
    metadata = two_shards(tmp_path)
    del metadata.storage_data[MetadataIndex("layers.10.w", torch.Size([2, 0]))]
    commit(tmp_path, metadata)
    run("ls", tmp_path, code=1)
    assert "layers.10.w (1 of 2 shards stored)" in run.err


def test_ls_refuses_files_outside_the_checkpoint(tmp_path: Path, run: Run) -> None:
    metadata = two_shards(tmp_path)
    metadata.storage_data[MetadataIndex("layers.9.note")] = _StorageInfo("/etc/hostname", 0, 10)
    commit(tmp_path, metadata)
    assert "layers.9.note: the metadata refers to '/etc/hostname'" in run.refused("ls", tmp_path)


def test_ls_does_not_report_a_system_error_as_damage(stored: Path, run: Run) -> None:
    file = next(stored.glob("*.distcp"))
    with failing("openat2", errno.EMFILE, file):
        message = run.refused("ls", stored)
    assert message.startswith(f"torch-ckpt: {file}: ")
    assert "Too many open files" in message


def test_ls_of_an_empty_state_prints_header_and_total(tmp_path: Path, run: Run) -> None:
    commit(tmp_path, Metadata(state_dict_metadata={}))
    assert "total: 0 tensors, 0 parameters, 0 objects, 0 files" in run("ls", tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"not a pickle", ".metadata"),
        (
            pickle.dumps(Metadata(state_dict_metadata={}, storage_data={"weight": 3})),
            "storage_data has a key",
        ),
    ],
    ids=["no pickle", "a field of another type"],
)
def test_damaged_metadata_is_refused(
    tmp_path: Path, run: Run, content: bytes, sentence: str
) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    assert sentence in run.refused("ls", tmp_path)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB")),
        *((999_950, "1.0 MB"), (20_931_504, "20.9 MB"), (3 * 10**9, "3.0 GB")),
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
    command = [sys.executable, "-m", "torch_ckpt", "ls", tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
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
    ["apply URL b", "apply a URL", "apply a b --out URL", "convert a b --config URL"],
)
def test_commands_on_directories_refuse_urls(run: Run, arguments: str) -> None:
    words = arguments.replace("URL", "s3://user:secret@bucket/run").split()
    assert "must be a local path" in run(*words, code=2)
    assert "secret" not in run.err


def test_commands_on_checkpoints_accept_urls(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path}/c"
    torch_ckpt.save({"w": torch.ones(3, 4), "n": 5}, url, no_dist=True)
    assert "1 tensor, 12 parameters, 1 object" in run("ls", url)
    assert "no damage found" in run("verify", url)
    assert "[0:3, 0:4]" in run("show", url, "w")
    run("convert", url, f"{url}.safetensors", "--tensors-only")
    run("diff", url, f"{url}.safetensors", "w")


@pytest.mark.parametrize(
    "arguments", ["ls URL", "verify URL", "show URL", "diff URL a", "convert URL a"]
)
def test_a_url_that_is_not_allowed_is_refused_in_one_line(run: Run, arguments: str) -> None:
    error = run(*arguments.replace("URL", "s3://user:secret@bucket/run").split(), code=2)
    assert "user name or a password" in error
    assert "secret" not in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("gc run --keep-last 0", "--keep-last: must be at least 1, got 0"),
        ("gc run --keep-every x", "--keep-every: must be an integer, got 'x'"),
        ("gc run --keep-every-hours=-1", "must be positive and finite, got '-1'"),
        ("show c --first=-1", "--first: must be at least 0, got -1"),
        ("diff a b --atol x", "--atol: must be a number, got 'x'"),
        ("diff a b --atol nan", "--atol: must be at least 0, got 'nan'"),
        ("diff a b --rtol=-1", "--rtol: must be at least 0, got '-1'"),
        ("convert a b --max-shard-size 5X", "must be a size such as 5GB or 512MiB"),
        ("convert a b --max-shard-size 0", "must be at least 1 byte, got '0'"),
        ("doctor c --size 1kB", "--size: must be at least 32768 bytes, got '1kB'"),
    ],
)
def test_a_wrong_option_is_explained_in_a_sentence(run: Run, arguments: str, sentence: str) -> None:
    assert sentence in run(*arguments.split(), code=2)


def test_each_command_escapes_control_characters(tmp_path: Path, run: Run) -> None:
    name = "\x1b[2J\nname"
    sound, damaged, other = tmp_path / "sound", tmp_path / "damaged", tmp_path / "other"
    for path in (sound, damaged):
        save({name: torch.zeros(3), "object": name}, path, thread_count=1)
    data_files(damaged)[0].unlink()
    save({}, other)
    torch.save({"t": torch.zeros(3)}, tmp_path / f"{name}.pt")
    marker = {"metrics": {name: 1.0}}
    save_step(LocalSteps(tmp_path / "run"), 1, {"t": torch.zeros(3)}, marker=lambda: marker)
    for arguments, code in (
        (["show", sound], 0),
        (["diff", sound, other], 1),
        (["convert", tmp_path / f"{name}.pt", tmp_path / "converted"], 0),
        (["steps", tmp_path / "run"], 0),
        (["verify", damaged], 1),
        (["ls", damaged], 1),
    ):
        run(*arguments, code=code)
        assert r"\x1b[2J\nname" in run.out + run.err, arguments
        assert "\x1b" not in run.out + run.err, arguments


# --- exit codes and wrong command lines ----------------------------------------------------------


def test_every_exit_code_is_documented() -> None:
    rows = re.findall(r"^\| ([0-9]+) \| (.*) \|$", DOCUMENT.read_text(), re.M)
    assert rows == [(str(code.value), code.meaning) for code in ExitCode]


def test_help_lists_the_exit_codes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    lines = run("--help").splitlines()
    assert all(len(line) <= 70 for line in lines)
    table = " ".join(" ".join(lines[lines.index("exit codes:") + 1 :]).split())
    assert table == " ".join(f"{code.value} {code.meaning}" for code in ExitCode)


def test_every_command_is_documented() -> None:
    text = DOCUMENT.read_text()
    assert [name for name in subcommands(build_parser()) if f"`{name} " not in text] == []


@pytest.mark.parametrize(
    "command",
    [
        *("ls PATH", "show PATH", "verify PATH", "diff PATH PATH"),
        *("convert PATH model.pt", "steps PATH", "gc PATH --keep-last 1", "delete PATH 1"),
        *("pin PATH 1", "unpin PATH 1", "doctor PATH"),
    ],
)
def test_an_error_is_2_with_json_too(tmp_path: Path, run: Run, command: str) -> None:
    words = command.replace("PATH", str(tmp_path / "none")).split()
    assert run.refused(*words, "--json").startswith("torch-ckpt: ")


def test_ctrl_c_is_130_and_one_line(tmp_path: Path, run: Run) -> None:
    save({"weight": torch.zeros(3)}, tmp_path)
    with before("pread", lambda: os.kill(os.getpid(), signal.SIGINT)):
        run("verify", tmp_path, code=ExitCode.INTERRUPTED)
    assert run.err == "torch-ckpt: interrupted\n"


def test_no_command_prints_examples_that_are_valid(run: Run) -> None:
    text = run(code=ExitCode.ERROR)
    examples = re.findall(r"^  torch-ckpt (.*)$", text, re.M)
    assert len(examples) == 5
    for example in examples:
        build_parser().parse_args(example.split())
    assert "torch-ckpt --help" in text


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("verfy", "did you mean 'verify'?"),
        ("frobnicate", "torch-ckpt --help lists the commands"),
        ("step", "did you mean 'steps'?"),
    ],
)
def test_a_misspelled_command_is_an_error_with_a_suggestion(run: Run, word: str, hint: str) -> None:
    assert f"unknown command {word!r}; {hint}" in run(word, "checkpoint", code=ExitCode.ERROR)


@pytest.mark.parametrize(
    ("arguments", "command", "error"),
    [
        (["ls", "x", "--wrong"], "ls", "--wrong"),
        (["--wrong", "ls", "x"], "ls", "--wrong"),
        (["steps", "x", "y"], "steps", "y"),
        (["verify", "x", "--quite"], "verify", "--quite; did you mean --quiet?"),
        (["gc", "x", "--keep-lst=3"], "gc", "--keep-lst=3; did you mean --keep-last?"),
    ],
)
def test_an_unknown_argument_is_an_error_with_a_suggestion(
    run: Run, arguments: list[str], command: str, error: str
) -> None:
    text = run(*arguments, code=ExitCode.ERROR)
    assert text.startswith(f"usage: torch-ckpt {command} ")
    assert text.endswith(f"unrecognized arguments: {error}\n")


def test_names_may_follow_options(tmp_path: Path, run: Run) -> None:
    save({"weight": torch.zeros(3), "bias": torch.zeros(3)}, tmp_path)
    assert "total: 1 tensor, " in run("ls", tmp_path, "--files", "weight")


@pytest.mark.parametrize("command", ["ls", "show", "verify", "diff"])
def test_each_command_prints_the_same_error(tmp_path: Path, run: Run, command: str) -> None:
    def error_of(path: object) -> str:
        return run.refused(command, *[path] * (2 if command == "diff" else 1))

    (tmp_path / "empty").mkdir()
    model = tmp_path / "model.pt"
    torch.save({"t": torch.ones(3)}, model)
    lacking = "no committed checkpoint: there is no"
    none, empty = tmp_path / "no", tmp_path / "empty"
    assert error_of(none) == f"torch-ckpt: {none}: {lacking} such directory\n"
    assert error_of(empty) == f"torch-ckpt: {empty}: {lacking} .metadata in the directory\n"
    assert error_of(model) == (
        f"torch-ckpt: {model} is not a directory but a torch.save file; convert it "
        "to a checkpoint with torch-ckpt convert (torch_ckpt.convert)\n"
    )
    assert "must be a path, got an empty string" in run(command, "", "", code=2)


@pytest.mark.parametrize("command", ["steps", "gc --keep-last 1", "delete", "pin", "unpin"])
def test_an_empty_root_is_refused(run: Run, command: str) -> None:
    name, *options = command.split()
    steps = ["1"] if name in ("delete", "pin", "unpin") else []
    error = run(name, "", *steps, *options, code=2)
    assert "must be a path, got an empty string" in error


def test_a_delta_is_not_applied_to_a_published_version(tmp_path: Path, run: Run) -> None:
    for fill in (1.0, 2.0):
        torch_ckpt.publish({"w": torch.full((9,), fill)}, tmp_path, delta=True)
    delta = tmp_path / "0000000001" / "torch_ckpt.delta"
    error = run.refused("apply", delta, tmp_path / "0000000000")
    assert "is a published version, which must not change; pass another directory" in error
    run("apply", delta, tmp_path / "0000000000", "--out", tmp_path / "out")
    assert "are equal" in run("diff", tmp_path / "out", tmp_path / "0000000001")
