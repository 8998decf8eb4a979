"""A rank for tests of the launcher.

    python -m tests.distributed.launched PATH ... (hang|tell)

``hang`` writes its process id to PATH, a pipe, and does not end; ``tell`` writes to
PATH-{rank}.json what it has been told by its environment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    path, what = sys.argv[1], sys.argv[-1]
    if what == "tell":
        told = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")}
        Path(f"{path}-{told['RANK']}.json").write_text(json.dumps({"environment": told}))
        return
    print("said before the hang", flush=True)
    with open(path, "w") as pipe:
        pipe.write(f"{os.getpid()}\n")
    signal.pause()


if __name__ == "__main__":
    main()
