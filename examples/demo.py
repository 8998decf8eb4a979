"""Shows the main job of torch_ckpt: training survives a kill and resumes on other ranks.

    python examples/demo.py

A small transformer trains on real English text on two CPU processes, is killed during a save, and
resumes from its newest complete checkpoint on three processes. The demo then compares the losses
with the losses of an uninterrupted run, and fails if they differ. It takes about a minute and a
half, and writes into a directory beneath build/demo, which it removes at the end.

The exit code is 0 if the losses are equal, and 1 if they differ or a step of the demo failed.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from train_transformer import ModelConfig, Transformer, checkpoint_name, training_text

from torch_ckpt import FileSystemWriter, cli

STEPS = 50
SAVE_EVERY = 10
RANKS = 2
RANKS_AFTER = 3  # the shards have other sizes, and some are uneven
KILL_IN_SAVE_OF = 40

# Allowed relative difference between a resumed and an uninterrupted loss. It is not 0, because
# three ranks add the losses and gradients of a batch in another order than two ranks, and each
# float64 addition rounds at 1e-16. Over 20 steps 3e-16 was measured. A wrong state differs by far
# more: if the first moments of one LayerNorm of 256 weights are zeroed on resume, the next losses
# differ by 1e-6.
TOLERANCE = 1e-12

ROUNDS = 7  # rounds of the timing; each saves about 310 MB three times
RUN_LIMIT = 120.0  # seconds for one training run, which takes 10 to 25 s on two cores


class DemoError(Exception):
    """A step of the demo failed. The message is printed without a traceback."""


def processes_below(root: int) -> list[int]:
    """Returns the ids of `root` and of all processes that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # the process may exit meanwhile
                # "id (name) state parent ...": the name may contain blanks and parentheses.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


class TrainingRun:
    """Runs train_transformer.py under torchrun in the background and prints its output, indented.

    A context manager that kills the remaining processes of the run when the block ends.
    """

    def __init__(self, ranks: int, arguments: Sequence[str | Path]) -> None:
        script = Path(__file__).with_name("train_transformer.py")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(script), *map(str, arguments)]
        self._begin = time.monotonic()
        self._process = subprocess.Popen(
            command,
            # More threads than cores slow each other down, and torchrun warns if this is not set.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only the demo, which then ends the run
        )
        self._printer = threading.Thread(target=self._print_output, daemon=True)
        self._printer.start()

    def __enter__(self) -> "TrainingRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _print_output(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            # A progress bar rewrites its line after each carriage return. Print its last state.
            line = raw.decode(errors="replace").rstrip().rpartition("\r")[2]
            print(f"   | {line}", flush=True)

    def _check(self) -> None:
        """Raises DemoError if the run takes too long or has failed."""
        code = self._process.poll()
        if code is None and time.monotonic() - self._begin > RUN_LIMIT:
            raise DemoError(f"the training run did not end within {RUN_LIMIT:.0f} s")
        if code not in (None, 0):
            self._printer.join()
            raise DemoError(f"the training run exited with code {code}; see its output above")

    def finish(self) -> float:
        """Waits for the end of the run and returns its seconds. Raises DemoError if it failed."""
        while self._process.poll() is None:
            self._check()
            time.sleep(0.05)
        self._check()
        self._printer.join()
        return time.monotonic() - self._begin

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Checks `condition` every half millisecond. Raises DemoError if the run ends first."""
        while not condition():
            self._check()
            if self._process.poll() is not None:
                raise DemoError("the training run ended before it could be killed")
            time.sleep(0.0005)

    def processes(self) -> list[int]:
        """Returns the ids of torchrun and all its workers; none if the run has ended."""
        return [] if self._process.poll() is not None else processes_below(self._process.pid)

    def kill(self, victims: Sequence[int] | None = None) -> None:
        """Sends SIGKILL to `victims`, by default the run's processes, and waits for their end."""
        # A signal to the process group is not enough: torchrun gives each worker its own session.
        for victim in self.processes() if victims is None else victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        self._process.wait()
        self._printer.join()  # ends when the last worker has closed the pipe


def step(number: int, title: str) -> None:
    """Prints the heading of one step of the demo."""
    print(f"\n{number}. {title}", flush=True)


def read_losses(path: Path) -> dict[int, float]:
    """Reads a run's JSON lines into step -> loss, without a last line that a kill truncated."""
    losses = {}
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            entry = json.loads(line)
            losses[entry["step"]] = entry["loss"]
    return losses


def is_complete(checkpoint: Path) -> bool:
    """True if the checkpoint has a .metadata file, which is written last."""
    return (checkpoint / ".metadata").exists()


def interrupt(work: Path) -> Path:
    """Trains, kills the run during a save, and returns the newest complete checkpoint."""
    checkpoints = work / "checkpoints"
    interrupted = checkpoints / checkpoint_name(KILL_IN_SAVE_OF)
    arguments = ["--steps", str(STEPS), "--checkpoints", checkpoints]
    arguments += ["--save-every", str(SAVE_EVERY), "--losses", work / "killed.jsonl"]
    with TrainingRun(RANKS, arguments) as run:
        run.wait_until(lambda: is_complete(checkpoints / checkpoint_name(SAVE_EVERY)))
        # Find the processes before the save, which takes only some hundredths of a second.
        victims = run.processes()
        run.wait_until(lambda: interrupted.is_dir() and any(interrupted.iterdir()))
        run.kill(victims)
    reached = max(read_losses(work / "killed.jsonl"))
    print(f"   SIGKILL to {len(victims)} processes after step {reached}; on disk:")
    complete = []
    for checkpoint in sorted(checkpoints.iterdir()):
        has_metadata = is_complete(checkpoint)
        print(f"   {checkpoint.name}  {'complete' if has_metadata else 'incomplete: no .metadata'}")
        if has_metadata:
            complete.append(checkpoint)
    if not complete:
        raise DemoError("no complete checkpoint is left to resume from")
    return complete[-1]


def compare_losses(expected: dict[int, float], resumed: dict[int, float], first: int) -> None:
    """Compares the losses of both runs. Raises DemoError if they differ."""
    steps = range(first, STEPS + 1)
    if list(resumed) != list(steps):
        raise DemoError(
            f"the resumed run has losses of steps {list(resumed)} instead of {first} to {STEPS}"
        )
    print(f"   step  uninterrupted       resumed on {RANKS_AFTER} ranks")
    for number in (first, (first + STEPS) // 2, STEPS):
        print(f"   {number:4d}  {expected[number]:.15f}   {resumed[number]:.15f}")
    differences = [abs(resumed[n] - expected[n]) / abs(expected[n]) for n in steps]
    print(
        f"   largest relative difference over all {len(steps)} steps: {max(differences):.1e}",
        end="",
    )
    print(f" (allowed: {TOLERANCE:.0e})")
    # The maximum ignores a NaN.
    if not all(difference <= TOLERANCE for difference in differences):
        raise DemoError("the losses of the resumed run and of the uninterrupted run differ")


def list_checkpoint(checkpoint: Path, lines: int = 12) -> None:
    """Prints the first lines of ``torch-ckpt ls`` and its total. Raises DemoError if ls fails."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = cli.main(["ls", str(checkpoint)])
    table = output.getvalue().splitlines()
    if code != 0:
        raise DemoError(f"torch-ckpt ls ended with exit code {code}")
    shown = table[:lines]
    for line in [*shown, f"... {len(table) - len(shown) - 2} more", table[-1]]:
        print(f"   {line}")


def large_state() -> tuple[dict[str, Any], str]:
    """Builds the training state of a larger model of the same kind; returns it and its description.

    The optimizer's moments are filled with random numbers, because untouched zeros share one page
    of memory and are cheaper to read than a real state.
    """
    model = Transformer(ModelConfig(width=512, layers=4)).double()
    model_state, optimizer_state = get_state_dict(model, torch.optim.AdamW(model.parameters()))
    for moments in optimizer_state["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            moments[name].normal_()
    parameters = sum(p.numel() for p in model.parameters())
    description = f"{parameters / 1e6:.1f} M float64 parameters with AdamW moments, "
    description += f"{3 * 8 * parameters / 1e6:.0f} MB, one process"
    return {"model": model_state, "optimizer": optimizer_state}, description


def seconds_to_save(state: dict[str, Any], directory: Path, writer: dcp.StorageWriter) -> float:
    """Saves into a fresh directory, removes it, and returns the seconds of the save."""
    begin = time.perf_counter()
    dcp.save(state, checkpoint_id=directory, storage_writer=writer, no_dist=True)
    seconds = time.perf_counter() - begin
    shutil.rmtree(directory)
    return seconds


def time_saves(work: Path) -> None:
    """Prints the seconds of a save by torch_ckpt and by the stock writer, in one line.

    All writers fsync (their default). The stock writer runs with its default, one thread, and with
    one thread for each core, up to 8. Each round has one save by each writer. The order changes
    from round to round, because a save changes the state of the disk for the next one.
    """
    state, description = large_state()
    directory = work / "timing"
    threads = min(os.cpu_count() or 1, 8)
    contenders: dict[str, Callable[[], dcp.StorageWriter]] = {
        "ours": lambda: FileSystemWriter(directory),
        "stock": lambda: dcp.FileSystemWriter(directory),
        "threaded": lambda: dcp.FileSystemWriter(directory, thread_count=threads),
    }
    seconds_to_save(state, directory, FileSystemWriter(directory, progress=True))
    names = list(contenders)  # the save above warmed up, and showed the progress bar
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(ROUNDS):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(seconds_to_save(state, directory, contenders[name]()))

    def ratio(name: str) -> float:
        return statistics.median(a / b for a, b in zip(times[name], times["ours"], strict=True))

    medians = {name: statistics.median(values) for name, values in times.items()}
    print(
        f"   {description}: torch_ckpt {medians['ours']:.2f} s; "
        f"stock {medians['stock']:.2f} s by default ({ratio('stock'):.2f} times ours), "
        f"{medians['threaded']:.2f} s with {threads} threads ({ratio('threaded'):.2f} times ours); "
        f"fsync on, medians of {ROUNDS} alternating rounds"
    )


def demo(work: Path) -> None:
    """Runs all steps in the directory `work`. Raises DemoError if one fails."""
    text = training_text()
    print("torch_ckpt demo: train, kill, resume on other ranks, compare")
    print(
        f"text:  {len(text):,} characters of real English: Python's own help topics "
        "(pydoc_data.topics)"
    )
    parameters = sum(p.numel() for p in Transformer(ModelConfig()).parameters())
    print(
        f"model: a decoder-only transformer on bytes, {parameters / 1e6:.1f} M parameters in "
        "float64, AdamW,\n       sharded over CPU processes by FSDP2 (fully_shard, gloo)"
    )

    step(1, f"Train {STEPS} steps on {RANKS} ranks without an interruption.")
    arguments = ["--steps", str(STEPS), "--losses", work / "uninterrupted.jsonl"]
    with TrainingRun(RANKS, arguments) as run:
        print(f"   {run.finish():.0f} s")

    step(
        2,
        f"Train again with a checkpoint every {SAVE_EVERY} steps; kill the run while it saves step "
        f"{KILL_IN_SAVE_OF}.",
    )
    checkpoint = interrupt(work)

    step(3, f"Resume {checkpoint.name} on {RANKS_AFTER} ranks and train up to step {STEPS}.")
    arguments = ["--steps", str(STEPS), "--resume", checkpoint, "--losses", work / "resumed.jsonl"]
    with TrainingRun(RANKS_AFTER, arguments) as run:
        print(f"   {run.finish():.0f} s")

    step(4, "Compare the losses.")
    compare_losses(
        read_losses(work / "uninterrupted.jsonl"),
        read_losses(work / "resumed.jsonl"),
        first=int(checkpoint.name.rpartition("_")[2]) + 1,
    )

    step(5, f"List the checkpoint: torch-ckpt ls {checkpoint.name}")
    list_checkpoint(checkpoint)

    step(6, "Compare the time of a larger save with the stock writer.")
    time_saves(work)


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """Makes a directory beneath build/demo, on the current disk; removes it at the end."""
    parent = Path("build", "demo")
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


def main() -> int:
    """Runs the demo and returns its exit code."""
    # SIGTERM must end the training run and remove the directory, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # The timing saves from a single process without a process group on purpose.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    begin = time.monotonic()
    try:
        with temporary_directory() as work:
            demo(work)
    except DemoError as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 1
    print(f"\nDone in {time.monotonic() - begin:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
