"""The code and the commands of README.md and docs/ run unchanged after a plain install."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.snippets import Snippet, commands_of, snippets_of

pytestmark = pytest.mark.full

REPOSITORY = Path(__file__).parents[3]
DOCUMENTS = [
    REPOSITORY / "README.md",
    *sorted(REPOSITORY.glob("docs/*.md")),
    *sorted(REPOSITORY.glob("docs/reference/*.md")),
]
WITH_SNIPPETS = [
    document for document in DOCUMENTS if any(snippet.language for snippet in snippets_of(document))
]

#: Other projects' trainers, which other tests run; Slurm; and code for which torch needs NumPy.
MOST_NOT_RUN = 11

_CODE = re.compile(r"^(\$ |import |from \w+ import |torch-ckpt |torchrun |make |pip )", re.M)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    """Returns the failures of each document. One process runs all documents."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.snippets", *WITH_SNIPPETS],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("document", WITH_SNIPPETS, ids=lambda document: document.name)
def test_the_snippets_of_a_document_run(outcomes: dict[str, str | None], document: Path) -> None:
    failed = outcomes[str(document)]
    assert failed is None, failed


def test_only_few_snippets_are_skipped() -> None:
    left_out = [
        f"{document.name}:{snippet.line}: {snippet.reason}"
        for document in DOCUMENTS
        for snippet in snippets_of(document)
        if snippet.reason is not None
    ]
    assert len(left_out) <= MOST_NOT_RUN, "\n".join(left_out)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_blocks_with_code_name_their_language(document: Path) -> None:
    bare = [snippet for snippet in snippets_of(document) if not snippet.language]
    assert not [snippet for snippet in bare if _CODE.search(snippet.code)]


def fault_of(words: list[str]) -> str | None:
    """Returns the defect of a command that this test does not run, or ""."""
    match words:
        case ["make", target]:
            makefile = (REPOSITORY / "Makefile").read_text()
            return None if f"\n{target}:" in makefile else f"there is no target {target}"
        case ["torchrun", "--nproc-per-node", _, script, *options]:
            text = (REPOSITORY / script).read_text()
            unknown = [o for o in options if o.startswith("--") and f'"{o}"' not in text]
            return f"{script} has no {', '.join(unknown)}" if unknown else None
        case ["torchrun", *_, "-m", "torch_ckpt", "doctor", _]:
            return None
        case ["pip", "install", "."] | ["kill", "-TERM", "PID"] | ["torch-ckpt", *_]:
            return None
    return f"{words[0]} is not known here"


@pytest.mark.parametrize("document", WITH_SNIPPETS, ids=lambda document: document.name)
def test_commands_that_are_not_run_name_existing_files_and_options(document: Path) -> None:
    faults = {
        " ".join(words): fault
        for snippet in snippets_of(document)
        if snippet.language == "console"
        for words in commands_of(snippet.code)
        if (fault := fault_of(words)) is not None
    }
    assert not faults


def test_a_failing_snippet_is_reported_with_its_line(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("# A page\n\n```python\nimport torch\nimport tqdm\n```\n")
    assert snippets_of(document) == [Snippet(4, "python", "import torch\nimport tqdm\n", None)]
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, document],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "page.md:4: " in done.stdout, done.stderr
    assert f'"{document}", line 5' in done.stdout
    assert "No module named 'tqdm'" in done.stdout


# Without torch, which takes seconds to import.
PLAIN = """
import sys
from types import ModuleType
for name in ("torch", "torch_ckpt", "torch_ckpt.cli"):
    sys.modules[name] = ModuleType(name)
sys.modules["torch_ckpt"].cli = sys.modules["torch_ckpt.cli"]
from pathlib import Path
from tests import snippets
snippets._PlainInstall.install()
print(snippets.run(Path(sys.argv[1])))
"""
