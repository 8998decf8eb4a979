"""Compares the first background save of a process with its later saves.

Before, only stock code has saved in the process, and synchronously. So the first save makes the
buffers, threads and processes that a saver keeps between saves. For a saver whose name ends in
"_reserved", torch_ckpt.reserve_pool reserves the memory before.

`python -m benchmarks.first_saves SAVER ...` is the fresh process; it prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch_ckpt

from . import fresh_process
from .background import BackgroundSample, Effort, Trace, summarize, trace_saves
from .contenders import SAVERS, BackgroundSaver, background_savers, single_rank_group
from .measure import Contender
from .states import payload_bytes, small_tensors_state, training_state
from .training import Training, one_thread

_RESERVED = "_reserved"
MEASURED_SAVERS = (
    "stock_thread",
    "stock_process",
    "ours_blocking",
    "ours_blocking_reserved",
    "ours_overlapped",
    "ours_overlapped_reserved",
)
# No saver of ours makes more files. The last chunk of each file may be partly unused.
_MAX_FILES = 16
_CHUNK_BYTES = 4 << 20
LATER_SAVES = 3
_WARM_UP_STEPS = 3


def first_contender(name: str) -> str:
    """Returns the contender name of a saver's first save."""
    return f"first_{name}"


def later_contender(name: str) -> str:
    """Returns the contender name of a saver's later saves."""
    return f"later_{name}"


def base_saver(name: str) -> str:
    """Returns the saver's name in contenders.background_savers()."""
    return name.removesuffix(_RESERVED)


def make_label(name: str, saver: BackgroundSaver) -> str:
    """Returns the label of a measured saver."""
    return saver.label + (", reserve_pool before" if name.endswith(_RESERVED) else "")


def sample_in_fresh_process(
    name: str, *, state_bytes: int, tensor_count: int, directory: Path, round_index: int
) -> list[BackgroundSample]:
    """Samples one saver's first save, and its later saves in the same process."""
    arguments = [name, "--size", str(state_bytes), "--tensors", str(tensor_count)]
    arguments += ["--dir", str(directory.resolve())]
    measured = fresh_process.run("first_saves", arguments)
    traces = [Trace(**entry) for entry in measured["saves"]]
    return [
        summarize(contender, of_contender, measured["bytes"], round_index=round_index)
        for contender, of_contender in (
            (first_contender(name), traces[:1]),
            (later_contender(name), traces[1:]),
        )
    ]


def main() -> None:
    """Measures one saver in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("saver", choices=MEASURED_SAVERS)
    parser.add_argument("--size", type=int, required=True, help="bytes of the state")
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="an existing directory")
    arguments = parser.parse_args()

    state = training_state(arguments.size, arguments.tensors)
    path: Path = arguments.dir / "first-saves"
    target = path / "measured"
    traces: list[Trace] = []
    with ExitStack() as stack:
        stack.callback(partial(shutil.rmtree, path, ignore_errors=True))
        saver = stack.enter_context(background_savers())[base_saver(arguments.saver)]
        if arguments.saver.endswith(_RESERVED):
            torch_ckpt.reserve_pool(payload_bytes(state) + _MAX_FILES * _CHUNK_BYTES)
        if arguments.saver == "stock_process":
            stack.enter_context(single_rank_group())
        stack.enter_context(one_thread())
        SAVERS["stock_1"].save(small_tensors_state(2), path / "warm-up")
        training = Training()
        for _ in range(_WARM_UP_STEPS):
            training.step()
        contender = Contender(
            name=arguments.saver,
            label=make_label(arguments.saver, saver),
            kind=saver.kind,
            run=lambda: saver.start(state, target),
            prepare=partial(shutil.rmtree, target, ignore_errors=True),
            target=target,
        )
        one_save = Effort(idle_steps=0, least_steps=0)
        for _ in range(1 + LATER_SAVES):
            traces += trace_saves(contender, training.step, one_save)
    saves = [asdict(trace) for trace in traces]
    print(json.dumps({"bytes": payload_bytes(state), "saves": saves}))


if __name__ == "__main__":
    main()
