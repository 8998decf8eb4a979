#!/usr/bin/env python3
"""Makes the screenshots of docs/cli.md: docs/images/cli-*.svg.

Runs torch-ckpt in a pseudo-terminal on a small generated run and draws the output with rich.
Usage: python scripts/cli_screenshots.py [DIRECTORY]
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from torch_ckpt.options import DEFAULT_OPTIONS
from torch_ckpt.ranks.group import SINGLE_RANK
from torch_ckpt.saving.handle import save
from torch_ckpt.steps import LocalSteps

REPOSITORY = Path(__file__).resolve().parents[1]
COLUMNS = 96

# rich's own format loads fonts from the network.
SVG_FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.S)

SCREENSHOTS = {
    "steps": ["torch-ckpt steps run", "torch-ckpt gc run --keep-last 2 --dry-run"],
    "ls-narrow": ["torch-ckpt ls run"],
    "verify": ["torch-ckpt verify run/300", "torch-ckpt verify run/200"],
    "diff": ["torch-ckpt diff run/300 run/400"],
}

# Widths in columns other than COLUMNS.
WIDTHS = {"ls-narrow": 60}


def make_run(root: Path) -> None:
    """Saves four steps; step 200 has a damaged record, and the save of step 500 is unfinished."""
    torch.manual_seed(0)
    projections = ("query", "key", "value", "output")
    state = {
        f"model.layers.{layer}.attention.{name}_projection.weight": torch.randn(256, 256)
        for layer in range(2)
        for name in projections
    }
    state |= {"model.embedding.weight": torch.randn(1000, 256), "epoch": 3}
    for hours, step in ((30, 100), (20, 200), (10, 300), (1, 400)):
        loss = 4 / (step / 100) ** 0.5
        marker = {"saved_at": time.time() - 3600 * hours, "metrics": {"loss": round(loss, 4)}}
        target = LocalSteps(root).target(
            step, DEFAULT_OPTIONS, attempt="0123abcd", marker=lambda m=marker: m
        )
        save(state, lambda target=target: target, SINGLE_RANK)
        state["model.layers.1.attention.query_projection.weight"] = torch.randn(256, 256)
    LocalSteps(root).set_pinned(100, True)
    committed = datetime(2026, 1, 31, 12, tzinfo=timezone.utc).timestamp()
    os.utime(root / "0000000400" / ".metadata", (committed, committed))
    unfinished = root / "0000000500.tmp-0123abcd"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(bytes(1_800_000))
    data = next((root / "0000000200").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def run_in_terminal(command: str, directory: Path, columns: int) -> str:
    """Runs a command in a pseudo-terminal; returns its output with escape sequences."""
    controller, device = pty.openpty()
    words = [sys.executable, "-m", "torch_ckpt", *shlex.split(command)[1:]]
    environment = {
        **os.environ,
        "COLUMNS": str(columns),
        "PYTHONPATH": str(REPOSITORY),
        "TERM": "xterm-256color",
        "TZ": "UTC",
    }
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        words, cwd=directory, stdin=device, stdout=device, stderr=device, env=environment
    )
    os.close(device)
    output = b""
    while True:
        try:
            chunk = os.read(controller, 1 << 16)
        except OSError:  # EIO: the command has ended
            break
        output += chunk
    os.close(controller)
    process.wait()
    # Keep what remains visible of a line that was redrawn.
    lines = output.decode().replace("\r\n", "\n").replace(str(directory), "/data").split("\n")
    return "\n".join(line.rpartition("\r\x1b[K")[2] for line in lines)


def draw(name: str, commands: list[str], directory: Path, target: Path) -> None:
    """Draws the output of some commands as an SVG."""
    columns = WIDTHS.get(name, COLUMNS)
    console = Console(record=True, width=columns, file=io.StringIO(), highlight=False)
    for command in commands:
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(run_in_terminal(command, directory, columns).rstrip("\n")))
    path = target / f"cli-{name}.svg"
    console.save_svg(
        str(path), title="torch-ckpt", code_format=SVG_FORMAT, unique_id=f"torch-ckpt-{name}"
    )
    print(f"{path}: {path.stat().st_size} bytes")


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "docs" / "images"
    with tempfile.TemporaryDirectory() as directory:
        make_run(Path(directory) / "run")
        for name, commands in SCREENSHOTS.items():
            draw(name, commands, Path(directory), target)


if __name__ == "__main__":
    main()
