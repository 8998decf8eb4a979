"""Trains with FSDP2 and AdamW on a CUDA device, is killed, resumes, and compares the losses.

`python -m tests.gpu_training --out FILE` runs every variant. The reference trains without
saves. A variant trains with a CheckpointManager that saves each step in the background. SIGKILL
ends it, and another process resumes it. Every loss before and after the kill must equal the
reference's loss bit for bit. With `--device cpu` the same code runs on gloo.

`python -m tests.gpu_training --train VARIANT ...` is one such process. It prints
"restored STEP", and after each step "STEP LOSS", the loss as a hexadecimal number.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_ckpt
from benchmarks.contenders import single_rank_group
from benchmarks.gpu import ending_by_sigterm

_WORDS = 64
_BATCH = 4
_TOKENS = 32
_HEADS = 4
_REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Variant:
    """One way to train. `reference` names the variant whose losses must be equal, if any."""

    staging: str | None  # None: no saves
    reference: str = ""
    sharded: bool = True
    captured: bool = False
    environment: dict[str, str] = field(default_factory=dict)


_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
VARIANTS = {
    "reference": Variant(None),
    "blocking": Variant("blocking", "reference"),
    "overlapped": Variant("overlapped", "reference"),
    "expandable": Variant("overlapped", "reference", environment=_EXPANDABLE),
    # Without sharding, the captured graph contains no collectives of NCCL.
    "captured_reference": Variant(None, sharded=False, captured=True),
    "captured_blocking": Variant("blocking", "captured_reference", sharded=False, captured=True),
    "captured_overlapped": Variant(
        "overlapped", "captured_reference", sharded=False, captured=True
    ),
}


class _Block(nn.Module):
    """A transformer block of operations that are deterministic on CUDA."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.queries_keys_values(self.norm(x)).chunk(3, -1)
        query, key, value = (
            part.view(batch, tokens, _HEADS, width // _HEADS).transpose(1, 2) for part in parts
        )
        scores = query @ key.transpose(2, 3) / (width // _HEADS) ** 0.5
        attended = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(attended)
        added: Tensor = self.mlp(x)
        return x + added


class _Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(_WORDS, width, bias=False)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(layers))
        self.head = nn.Linear(width, _WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def _batch(step: int, device: str) -> Tensor:
    """Returns a batch of one-hot words. Training predicts the next word."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, _WORDS, (_BATCH, _TOKENS + 1), generator=generator)
    return nn.functional.one_hot(words, _WORDS).float().to(device)


def _loss(model: nn.Module, words: Tensor) -> Tensor:
    logits = model(words[:, :-1])
    chosen: Tensor = (logits.log_softmax(-1) * words[:, 1:]).sum(-1)
    return -chosen.mean()


def _step_function(
    model: nn.Module, optimizer: torch.optim.Optimizer, variant: Variant, device: str
) -> Callable[[Tensor], Tensor]:
    """Returns a function that trains on a batch and returns the loss.

    For a captured variant the function replays a graph. The graph uses the present memory of the
    tensors of model and optimizer, so restore a checkpoint before this call.
    """

    def step(words: Tensor) -> Tensor:
        loss = _loss(model, words)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    if not variant.captured or device == "cpu":
        return step
    words = _batch(0, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(words)

    def replay(batch: Tensor) -> Tensor:
        words.copy_(batch)
        graph.replay()
        return loss

    return replay


def _prepare_optimizer(model: nn.Module, device: str) -> torch.optim.Optimizer:
    """Makes AdamW and its state, so that a graph does not capture its creation.

    The parameters do not change.
    """
    capturable = device != "cpu"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=capturable)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with contextlib.ExitStack() as stack:
        if capturable:
            # CUDA graphs require that the first steps run on a side stream.
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            stack.callback(torch.cuda.current_stream().wait_stream, side)
            stack.enter_context(torch.cuda.stream(side))
        _loss(model, _batch(0, device)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
            for entry in optimizer.state[parameter].values():
                entry.zero_()
    return optimizer


def _train(options: argparse.Namespace) -> None:
    """Trains in this process, starting from the newest checkpoint."""
    variant = VARIANTS[options.train]
    device: str = options.device
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    with contextlib.ExitStack() as stack:
        model: nn.Module = _Transformer(options.width, options.layers).to(device)
        if variant.sharded:
            if device != "cpu":
                torch.cuda.set_device(0)
            backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
            stack.enter_context(single_rank_group(backend))
            mesh = init_device_mesh(device, (1,))
            for block in model.blocks:  # type: ignore[union-attr]
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if variant.captured:
            optimizer = _prepare_optimizer(model, device)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state = {"model": model, "optimizer": optimizer}
        first = 0
        manager = None
        if variant.staging is not None:
            manager = stack.enter_context(
                torch_ckpt.CheckpointManager(
                    options.dir,
                    keep=2,
                    saves=torch_ckpt.manager.SaveOptions(staging=variant.staging),
                    write=torch_ckpt.WriteOptions(progress=False),
                )
            )
            if variant.staging == "overlapped":
                manager.guard(optimizer)
            first = manager.restore(state)
        print(f"restored {first}", flush=True)
        step = _step_function(model, optimizer, variant, device)
        for number in range(first + 1, options.steps + 1):
            if manager is not None and variant.captured:
                # A replayed graph does not run the optimizer's guard.
                manager.wait_until_staged()
            loss = float(step(_batch(number, device)))
            if manager is not None:
                manager.save(number, state)
            print(f"{number} {loss.hex()}", flush=True)


# --- the process that starts the trainings -------------------------------------------------------


@dataclass
class TrainingRun:
    """Output of one process: the step that it restored, and the losses by step."""

    restored: int = -1
    losses: dict[int, str] = field(default_factory=dict)
    exit_status: int | None = None
    errors: str = ""


@dataclass
class Outcome:
    """Result of a variant. `failure` is None if all losses equal the losses of the reference."""

    variant: str
    failure: str | None
    restored: int
    killed_after: int
    steps: int
    seconds: float


def _run(
    name: str, options: argparse.Namespace, directory: Path, kill_after: int = 0
) -> TrainingRun:
    """Trains in another process and kills it when it reports step `kill_after`."""
    command = [sys.executable, "-m", "tests.gpu_training", "--train", name]
    command += ["--device", options.device, "--steps", str(options.steps)]
    command += ["--width", str(options.width), "--layers", str(options.layers)]
    environment = os.environ | VARIANTS[name].environment
    # PyTorch's deterministic mode requires it for cuBLAS.
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    run = TrainingRun()
    process = subprocess.Popen(
        [*command, "--dir", str(directory)],
        cwd=_REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    killer = threading.Timer(options.seconds_each, process.kill)
    killer.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            errors = pool.submit(process.stderr.read)
            for line in process.stdout:
                if found := re.fullmatch(r"restored (\d+)\n", line):
                    run.restored = int(found[1])
                elif found := re.fullmatch(r"(\d+) (\S+)\n", line):
                    run.losses[int(found[1])] = found[2]
                    if int(found[1]) == kill_after:
                        process.send_signal(signal.SIGKILL)
            run.exit_status = process.wait()
            run.errors = errors.result()
    finally:
        killer.cancel()
        process.kill()
    return run


def _compare(
    name: str, options: argparse.Namespace, directory: Path, reference: TrainingRun
) -> Outcome:
    """Trains a variant, kills it, resumes it, and compares its losses with the reference's."""
    began = time.monotonic()
    kill_after = options.steps // 2
    first = _run(name, options, directory, kill_after)
    second = TrainingRun()
    failure = None
    if first.exit_status != -signal.SIGKILL:
        failure = f"the first process ended with {first.exit_status}: {first.errors[-2000:]}"
    else:
        second = _run(name, options, directory)
        failure = _difference(first, second, reference, options.steps)
    seconds = round(time.monotonic() - began, 1)
    return Outcome(name, failure, second.restored, kill_after, options.steps, seconds)


def _difference(
    first: TrainingRun, second: TrainingRun, reference: TrainingRun, steps: int
) -> str | None:
    if second.exit_status != 0:
        return f"the second process ended with {second.exit_status}: {second.errors[-2000:]}"
    if second.restored < 1:
        return "the second process found no checkpoint"
    if sorted(second.losses) != list(range(second.restored + 1, steps + 1)):
        return f"restored at {second.restored}, trained {sorted(second.losses)}"
    for run in (first, second):
        for step, loss in run.losses.items():
            if loss != reference.losses.get(step):
                return f"step {step}: loss {loss}, without saves {reference.losses.get(step)}"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu_training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=4, help="variants that train side by side")
    parser.add_argument("--seconds-each", type=float, default=60.0, help="for one process")
    parser.add_argument("--dir", type=Path, default=Path("build/gpu-training"))
    parser.add_argument("--train", choices=VARIANTS, help="train in this process")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def main(arguments: Sequence[str] | None = None) -> list[Outcome]:
    """Runs the variants and writes their outcomes."""
    options = _parser().parse_args(arguments)
    if options.train:
        _train(options)
        return []
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=options.dir)).resolve()
    compared = [name for name in options.variants if VARIANTS[name].reference]
    references = {VARIANTS[name].reference: TrainingRun() for name in compared}
    try:
        with ThreadPoolExecutor(options.at_once) as pool:
            running = {
                name: pool.submit(_run, name, options, directory / name) for name in references
            }
            references = {name: future.result() for name, future in running.items()}
            futures = [
                pool.submit(
                    _compare, name, options, directory / name, references[VARIANTS[name].reference]
                )
                for name in compared
            ]
            outcomes = [future.result() for future in futures]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for name, run in references.items():
        if run.exit_status != 0:
            print(f"{name} ended with {run.exit_status}:\n{run.errors}", flush=True)
    for outcome in outcomes:
        print(f"{outcome.variant}: {outcome.failure or 'losses are equal'}", flush=True)
    if options.out:
        options.out.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return outcomes


if __name__ == "__main__":
    with ending_by_sigterm():
        sys.exit(any(outcome.failure for outcome in main()))
