"""Records the digests of the saves by the installed version, in recorded.json.

    python -m tests.references.record

Two runs must agree, so that a difference is a change of the files and not chance.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.references.saves import RECORDED, made, version

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        found, again = made(Path(one)), made(Path(other))
    different = sorted(name for name in found | again if found.get(name) != again.get(name))
    if different:
        raise SystemExit(f"two runs differ in {different}")
    RECORDED.write_text(json.dumps({"torch": version(), "files": found}, indent=1) + "\n")
