"""``torch-ckpt verify``: output and exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.commands import Run
from tests.forked import in_fresh_process
from tests.support import data_files, flip_bit, save
from tests.verified_checkpoints import payload_offset, place
from torch_ckpt import cli


def test_the_command_prints_a_summary(ours: Path, run: Run) -> None:
    (line,) = run("verify", ours).splitlines()
    assert run.err == ""
    assert line.startswith(f"{ours}: 9 records, ")
    assert line.endswith("GB/s: no damage found")


def test_the_command_lists_all_damage(our_copy: Path, run: Run) -> None:
    for name in ("small", "blocks"):
        flip_bit(place(our_copy, name)[0], payload_offset(our_copy, name), 0)
    place(our_copy, "many blocks")
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


def test_the_command_escapes_names(tmp_path: Path, run: Run) -> None:
    save({"\x1b[2Jname": torch.zeros(3)}, tmp_path, thread_count=1)
    data_files(tmp_path)[0].unlink()
    output = run("verify", tmp_path, code=1)
    assert "\x1b" not in output
    assert r"\x1b[2Jname" in output


def verify_and_diff(path: str) -> tuple[int, int, bool]:
    """Returns the exit codes of verify and diff, and True if CUDA was initialized."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    codes = cli.main(["verify", path]), cli.main(["diff", path, path])
    return *codes, torch.cuda.is_initialized()


def test_the_commands_do_not_initialize_cuda(ours: Path) -> None:
    assert in_fresh_process(verify_and_diff, str(ours)) == (0, 0, False)
