"""The examples of docs/remote.md run as they are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import run_script
from tests.object_server import ObjectServer
from tests.snippets import snippets_of

PAGE = Path(__file__).parents[3] / "docs" / "remote.md"


def test_the_examples_save_and_load_at_a_server(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    variables = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT_URL": "endpoint_url",
    }
    for variable, name in variables.items():
        monkeypatch.setenv(variable, server.options[name])
    snippets = [one for one in snippets_of(PAGE) if one.language == "python" and not one.reason]
    run = run_script("\n".join(snippet.code for snippet in snippets))
    assert run.returncode == 0, run.stderr
    names = set(server.objects)
    assert {"final/.metadata", "dcp/100/.metadata", "run/0000000300/write_completed"} <= names
    assert "run/0000000400/write_completed" in names
    assert not server.uploads
