"""Ctrl-C at any moment of a load or a verification leaves no open descriptor.

A signal handler runs between two bytecode instructions. A trace function that raises simulates it,
at each instruction of the functions that open files.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.support import open_descriptors
from torch_ckpt.checkpoint import directory, files, index, locating
from torch_ckpt.inspection import verify
from torch_ckpt.loading import reader

_FILES = {module.__file__ for module in (files, directory)}
_FUNCTIONS = {
    (index.__file__, "metadata_bytes_in"),
    (locating.__file__, "open_checkpoint"),
    (reader.__file__, "_metadata_bytes"),
    (reader.__file__, "_opening"),
    (reader.__file__, "_opened"),
    (verify.__file__, "verify"),
    (verify.__file__, "_length_of"),
}


def interrupted_at(number: int, work: Callable[[], Any]) -> bool:
    """Runs ``work`` with Ctrl-C before one instruction. Returns False if there are fewer
    instructions."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        code = frame.f_code
        if code.co_filename not in _FILES and (code.co_filename, code.co_name) not in _FUNCTIONS:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except BaseException:
        # torch wraps it in an exception of its own.
        sys.settrace(before)
    finally:
        sys.settrace(before)
    return left <= 0


@pytest.mark.parametrize("what", ["load", "verify"])
def test_an_interrupt_at_any_instruction_leaves_no_open_descriptor(
    tmp_path: Path, what: str
) -> None:
    # An object in addition to the tensor: torch's code reads it.
    torch_ckpt.save(
        {"t": torch.arange(4.0), "step": 1},
        tmp_path,
        no_dist=True,
        options=torch_ckpt.WriteOptions(thread_count=1),
    )
    work: dict[str, Callable[[], Any]] = {
        "load": lambda: torch_ckpt.load({"t": torch.zeros(4), "step": 0}, tmp_path, no_dist=True),
        "verify": lambda: torch_ckpt.verify(tmp_path),
    }
    work[what]()
    before = open_descriptors()
    number = 1
    while interrupted_at(number, work[what]):
        gc.collect(0)
        assert open_descriptors() <= before, f"after an interrupt at instruction {number}"
        number += 1
    assert number > 50, "the sweep has seen nothing"
