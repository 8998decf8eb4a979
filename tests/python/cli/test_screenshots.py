"""The screenshots of docs/cli.md, which scripts/cli_screenshots.py makes."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.cli_screenshots import SCREENSHOTS, draw, make_run

REPOSITORY = Path(__file__).parents[3]
MOST_BYTES = 60_000


def test_every_screenshot_is_small_loads_no_font_and_is_shown() -> None:
    document = (REPOSITORY / "docs" / "cli.md").read_text()
    images = REPOSITORY / "docs" / "images"
    assert {path.name for path in images.glob("cli-*.svg")} == {
        f"cli-{name}.svg" for name in SCREENSHOTS
    }
    for path in images.glob("cli-*.svg"):
        text = path.read_text()
        assert len(text) < MOST_BYTES
        assert "font-face" not in text
        assert re.search(r"(?:src|href)\s*[:=]", text) is None
        assert f"(images/{path.name})" in document


def test_the_script_draws_the_output_of_a_command(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    draw("steps", ["torch-ckpt steps run"], tmp_path, tmp_path)
    text = (tmp_path / "cli-steps.svg").read_text()
    for word in ("METRICS", "loss=4", "unfinished", "0000000500.tmp-0123abcd"):
        assert word in text
