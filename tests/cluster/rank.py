"""A rank on a host: ``python -m tests.cluster.rank MODULE FUNCTION ARGUMENTS``.

Calls the function with arguments from JSON, in an initialized process group, which the function may
destroy. Prints the result as
JSON in the last line.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys

import torch.distributed as dist

from tests.ranks import WHERE_SIGNAL


def main() -> None:
    module, name, arguments = sys.argv[1:]
    faulthandler.enable()
    faulthandler.register(WHERE_SIGNAL)
    work = getattr(importlib.import_module(module), name)
    dist.init_process_group("gloo")
    result = work(*json.loads(arguments))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
