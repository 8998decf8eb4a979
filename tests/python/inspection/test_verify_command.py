"""``torch-ckpt verify``: output and exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.forked import in_fresh_process
from tests.support import data_files, flip_bit, save
from tests.verified_checkpoints import payload_offset, place
from torch_ckpt import cli


def test_the_command_prints_a_summary(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(ours)]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    (line,) = output.out.splitlines()
    assert line.startswith(f"{ours}: 9 records, ")
    assert line.endswith("GB/s: no damage found")


def test_the_command_lists_all_damage(our_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("small", "blocks"):
        flip_bit(place(our_copy, name)[0], payload_offset(our_copy, name), 0)
    place(our_copy, "many blocks")
    assert cli.main(["verify", str(our_copy), "--threads", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split(": ")[1] for line in lines[:-1]) == ["blocks", "small"]
    assert lines[-1].endswith("2 locations damaged")


def test_the_command_can_print_only_damage(
    our_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", "--quiet", str(our_copy)]) == 0
    assert capsys.readouterr().out == ""
    flip_bit(place(our_copy, "small")[0], payload_offset(our_copy, "small"), 0)
    assert cli.main(["verify", "--quiet", str(our_copy)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("damaged: small: ")


def test_the_command_prints_json(our_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_files(our_copy)[0].unlink()
    assert cli.main(["verify", "--json", str(our_copy)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert [entry["file"] for entry in document["missing"]] == ["__0_0.distcp"]


def test_the_command_escapes_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save({"\x1b[2Jname": torch.zeros(3)}, tmp_path, thread_count=1)
    data_files(tmp_path)[0].unlink()
    assert cli.main(["verify", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert r"\x1b[2Jname" in output


def test_the_command_reports_a_missing_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "no committed checkpoint: there is no .metadata" in output.err
    assert output.err.count("\n") == 1


def verify_and_diff(path: str) -> tuple[int, int, bool]:
    """Returns the exit codes of verify and diff, and True if CUDA was initialized."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    codes = cli.main(["verify", path]), cli.main(["diff", path, path])
    return *codes, torch.cuda.is_initialized()


def test_the_commands_do_not_initialize_cuda(ours: Path) -> None:
    assert in_fresh_process(verify_and_diff, str(ours)) == (0, 0, False)
