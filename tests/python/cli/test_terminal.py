"""Output on terminals: tables that fit, colours, progress; and plain text everywhere else."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import data_files, save, save_step
from tests.terminals import run_in_terminal, visible
from torch_ckpt import cli
from torch_ckpt._base.formatting import Table
from torch_ckpt.cli.output import fit_table
from torch_ckpt.steps import LocalSteps

LONG = "model.layers.10.self_attention.query_projection.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    save({LONG: torch.zeros(30, 40), "model.bias": torch.zeros(7), "step": 3}, path)
    return path


@pytest.fixture(autouse=True)
def _with_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture(params=[True, False], ids=["rich", "without rich"])
def _with_and_without_rich(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setitem(sys.modules, "rich.console", None)


# --- tables --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_with_and_without_rich")
@pytest.mark.parametrize("columns", [30, 60, 80, 100])
@pytest.mark.parametrize("form", [[], ["--files"]], ids=["items", "files"])
def test_the_tables_of_ls_fit_the_terminal(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, columns: int, form: list[str]
) -> None:
    code, output = run_in_terminal(monkeypatch, ["ls", str(checkpoint), *form], columns)
    assert code == 0
    *tables, total = visible(output)
    assert total.startswith("total: 2 tensors, ")
    notes = [line for line in tables if line.startswith("(narrow terminal, ")]
    assert all(len(line.rstrip()) <= columns for line in tables if line not in notes)
    assert tables[0].split()[0] in ("NAME", "FILE")


def test_a_long_name_is_wrapped_after_a_dot_and_a_column_that_does_not_fit_is_named(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    _, output = run_in_terminal(monkeypatch, ["ls", str(checkpoint)], 60)
    lines = visible(output)
    (first,) = [n for n, line in enumerate(lines) if line.startswith("model.layers")]
    name, rest = lines[first].split(maxsplit=1)
    assert name == "model.layers.10."
    assert rest.startswith("float32  [30, 40]")
    continued = itertools.takewhile(lambda line: line.startswith("  "), lines[first + 1 :])
    assert name + "".join(map(str.strip, continued)) == LONG
    assert "FILES" not in lines[0].split()
    assert "(narrow terminal, not shown: FILES)" in lines


@pytest.mark.usefixtures("_with_and_without_rich")
def test_a_wide_terminal_shows_the_same_text_as_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    _, output = run_in_terminal(monkeypatch, ["ls", str(checkpoint)], 200)
    assert cli.main(["ls", str(checkpoint)]) == 0
    lines = [line.rstrip() for line in visible(output)]
    assert lines == capsys.readouterr().out.splitlines()


CELLS = st.text("abcdefgh.0123", min_size=1, max_size=60)


@given(
    rows=st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=5),
    width=st.integers(10, 200),
    optional=st.lists(st.sampled_from(["SIZE", "FILES"]), unique=True),
)
def test_a_fitted_table_is_no_wider_than_the_terminal_and_keeps_every_name(
    rows: list[tuple[str, str, str]], width: int, optional: list[str]
) -> None:
    table = Table(("NAME", "SIZE", "FILES"), rows, frozenset({"SIZE"}), optional)
    fitted = fit_table(table, width)
    assert max(map(len, fitted.lines())) <= width
    names = "".join(row[0].strip() for row in fitted.rows)
    assert names == "".join(row[0] for row in rows)


# --- colours -------------------------------------------------------------------------------------


def test_states_are_coloured_unless_no_color_is_set(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, tmp_path: Path
) -> None:
    _, output = run_in_terminal(monkeypatch, ["verify", str(checkpoint)])
    assert "\x1b[32mno damage found\x1b[0m" in output
    save({"weight": torch.zeros(3)}, tmp_path)
    data_files(tmp_path)[0].unlink()
    code, output = run_in_terminal(monkeypatch, ["ls", str(tmp_path), "--files"])
    assert code == 1
    assert "\x1b[31mmissing" in output
    assert "\x1b[1mFILE " in output
    monkeypatch.setenv("NO_COLOR", "1")
    _, output = run_in_terminal(monkeypatch, ["verify", str(checkpoint)])
    assert "no damage found" in output
    assert "\x1b[3" not in output


def test_names_with_markup_are_not_rendered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save({"[red]x[/red]": torch.zeros(3), ":smile:\x1b[2J": torch.zeros(3)}, tmp_path)
    _, output = run_in_terminal(monkeypatch, ["ls", str(tmp_path)])
    assert "[red]x[/red]" in output
    assert ":smile:\\x1b[2J" in output
    assert "\x1b[2J" not in output


# --- progress ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["verify PATH", "show PATH model", "diff PATH PATH", "convert PATH PATH.pt"]
)
def test_a_long_command_shows_progress_and_erases_it(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, command: str
) -> None:
    words = command.replace("PATH", str(checkpoint)).split()
    code, output = run_in_terminal(monkeypatch, words)
    assert code == 0
    drawings, _, report = output.rpartition("\r\x1b[K")
    assert "% of " in drawings
    assert "% of " not in report


def test_deletions_and_doctor_show_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for step in (1, 2, 3, 4):
        save_step(LocalSteps(tmp_path), step, {"t": torch.ones(100)})
    for title, arguments in (
        ("delete", ["delete", str(tmp_path), "1"]),
        ("delete", ["gc", str(tmp_path), "--keep-last", "1"]),
        ("measure", ["doctor", str(tmp_path), "--size", "1MiB"]),
    ):
        _, output = run_in_terminal(monkeypatch, arguments)
        assert f"{title}: " in output.split("% of ")[0]


@pytest.mark.parametrize("option", ["--json", "--quiet"])
def test_json_and_findings_only_show_no_progress(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, option: str
) -> None:
    _, output = run_in_terminal(monkeypatch, ["verify", str(checkpoint), option])
    assert "% of" not in output


# --- pipes ---------------------------------------------------------------------------------------


def test_a_pipe_gets_plain_text_and_rich_is_not_imported(checkpoint: Path) -> None:
    code = (
        "import sys\n"
        "from torch_ckpt.cli import main\n"
        "assert main(['ls', sys.argv[1]]) == 0\n"
        "assert 'rich' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert LONG in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_an_encoding_without_a_character_of_a_name_is_no_error(tmp_path: Path) -> None:
    save({"größe": torch.zeros(3)}, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "torch_ckpt", "ls", str(tmp_path)],
        env={"PYTHONIOENCODING": "ascii"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "gr\\xf6\\xdfe" in done.stdout
