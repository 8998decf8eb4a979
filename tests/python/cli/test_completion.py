"""``torch-ckpt completion``: the scripts for bash, zsh and fish."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import Run
from torch_ckpt.cli.arguments import build_parser
from torch_ckpt.cli.completion import SHELLS, completion_script, subcommands

COMMANDS = list(subcommands(build_parser()))


def completed(script: str, words: list[str]) -> list[str]:
    """Returns the words that bash would offer for the last of ``words``."""
    assignment = f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}"
    code = f"{script}\n{assignment}; _torch_ckpt; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    command = ["bash", "--noprofile", "--norc", "-u", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ([""], [*COMMANDS, "-h", "--help", "--version"]),
        (["ver"], ["verify"]),
        (["p"], ["pin"]),
        (["verify", "x", "--"], ["--help", "--threads", "--json", "--quiet"]),
        (["gc", "x", "--keep-l"], ["--keep-last"]),
        (["gc", "x", "--mode", ""], ["min", "max"]),
        (["completion", ""], list(SHELLS)),
        (["unknown", "--"], []),
        (["verify", "check"], []),  # bash completes paths
    ],
    ids=lambda value: " ".join(value) or "nothing",
)
def test_bash_completes_commands_options_and_choices(words: list[str], offered: list[str]) -> None:
    script = completion_script(build_parser(), "bash")
    assert "complete -o default -F _torch_ckpt torch-ckpt" in script
    assert completed(script, ["torch-ckpt", *words]) == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_has_every_command_and_option(run: Run, shell: str) -> None:
    script = run("completion", shell)
    for name, parser in subcommands(build_parser()).items():
        assert name in script
        for action in parser._actions:
            for option in action.option_strings:
                flag = option if shell != "fish" else f" {'-' * (2 - option.count('-'))}"
                assert flag.strip() in script


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_accepts_its_script(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = completion_script(build_parser(), shell)
    done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_fish_completes_commands_and_options() -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    script = completion_script(build_parser(), "fish")
    code = f'{script}\ncomplete -C "torch-ckpt ver"\ncomplete -C "torch-ckpt gc x --mode "'
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True
    )
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["verify", "max", "min"]


def test_zsh_completes_commands_and_options(tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "script").write_text(completion_script(build_parser(), "zsh"))
    terminal, device = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "dumb"}
    process = subprocess.Popen(
        ["zsh", "-f", "-i"],
        stdin=device,
        stdout=device,
        stderr=device,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
    )
    os.close(device)

    def type_until(text: str, expected: str) -> None:
        os.write(terminal, text.encode())
        output = ""
        while expected not in output:
            assert select.select([terminal], [], [], 60)[0], output
            output += os.read(terminal, 1 << 16).decode()

    try:
        loading = "autoload -Uz compinit; compinit -u -D; source ./script; echo loa''ded\n"
        type_until(loading, "loaded")
        type_until("torch-ckpt ver\t", "verify ")
        type_until("x --thr\t", "--threads ")
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
