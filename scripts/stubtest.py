"""Compares the stubs of the extension modules with the modules, by mypy's stubtest."""

import runpy
import sys

import torch  # noqa: F401  (torch_ckpt._C needs its libraries)

sys.argv[1:] = [
    *("--allowlist", "scripts/stubtest_allowlist.txt"),
    *("torch_ckpt._C", "torch_ckpt._core"),
]
runpy.run_module("mypy.stubtest", run_name="__main__")
