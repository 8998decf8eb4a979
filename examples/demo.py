"""Shows the main job of torch_ckpt: training that survives a kill and goes on somewhere else.

    python examples/demo.py

A small transformer learns real English text on two CPU processes, is killed in the middle of a
save, and goes on from its last whole checkpoint on three processes. The demo then holds its losses
against those of a run that nothing happened to, and fails when they are not the same. It takes
about a minute and a half, writes below build/demo in the current directory and removes that again.

Exit code 0 when all of that went well, 1 when not.
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
RANKS_AFTER = 3  # shards of other sizes, some of them uneven
KILL_IN_SAVE_OF = 40

# What a resumed loss may differ by, relative to the uninterrupted one. Not 0: three ranks add up a
# batch's losses and gradients in another order than two, and each float64 addition rounds at 1e-16.
# Over 20 steps 3e-16 was measured. A wrong state is off by far more: with the first moments of one
# LayerNorm of 256 weights zeroed on resume, the next losses differ by 1e-6.
TOLERANCE = 1e-12

ROUNDS = 7  # of the timing; each saves about 310 MB three times
RUN_LIMIT = 120.0  # seconds for one training run, all of which take 10 to 25 on two cores


class DemoError(Exception):
    """The demo did not get to its end; the message says why, to be printed as it is."""


def processes_below(root: int) -> list[int]:
    """Returns the ids of `root` and of all processes that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it may end while we look
                # "id (name) state parent ...": the name may hold blanks and parentheses itself.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


class TrainingRun:
    """train_transformer.py under torchrun, in the background; prints what it prints, indented.

    A context manager: whatever is left of the run when the block ends is killed.
    """

    def __init__(self, ranks: int, arguments: Sequence[str | Path]) -> None:
        script = Path(__file__).with_name("train_transformer.py")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(script), *map(str, arguments)]
        self._begin = time.monotonic()
        self._process = subprocess.Popen(
            command,
            # More threads than cores only slow one another down, and torchrun warns when it has to
            # set this itself.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the demo, which ends the run in its own way
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
            # A progress bar rewrites its line after each carriage return: show how the line ended.
            line = raw.decode(errors="replace").rstrip().rpartition("\r")[2]
            print(f"   | {line}", flush=True)

    def _check(self) -> None:
        """Raises DemoError when the run takes too long or has ended badly."""
        code = self._process.poll()
        if code is None and time.monotonic() - self._begin > RUN_LIMIT:
            raise DemoError(f"the training run is not done after {RUN_LIMIT:.0f} s")
        if code not in (None, 0):
            self._printer.join()
            raise DemoError(f"the training run ended with exit code {code}, see its output above")

    def finish(self) -> float:
        """Waits for the end and returns the run's seconds. Raises DemoError when it failed."""
        while self._process.poll() is None:
            self._check()
            time.sleep(0.05)
        self._check()
        self._printer.join()
        return time.monotonic() - self._begin

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Looks at `condition` every half millisecond. Raises DemoError when the run ends first."""
        while not condition():
            self._check()
            if self._process.poll() is not None:
                raise DemoError("the training run ended before it could be killed")
            time.sleep(0.0005)

    def processes(self) -> list[int]:
        """Returns the ids of torchrun and all its workers; none when the run has ended."""
        return [] if self._process.poll() is not None else processes_below(self._process.pid)

    def kill(self, victims: Sequence[int] | None = None) -> None:
        """Sends SIGKILL to `victims`, by default the run's processes, and waits for their end."""
        # One signal to a process group would not do: torchrun gives each worker its own session.
        for victim in self.processes() if victims is None else victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        self._process.wait()
        self._printer.join()  # ends when the last worker is gone: the pipe has no writer any more


def step(number: int, title: str) -> None:
    """Prints the heading of one step of the demo."""
    print(f"\n{number}. {title}", flush=True)


def read_losses(path: Path) -> dict[int, float]:
    """Reads a run's JSON lines into step -> loss; leaves out a last line that a kill cut short."""
    losses = {}
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            entry = json.loads(line)
            losses[entry["step"]] = entry["loss"]
    return losses


def is_complete(checkpoint: Path) -> bool:
    """A checkpoint is there exactly when its .metadata is: that is written last."""
    return (checkpoint / ".metadata").exists()


def interrupt(work: Path) -> Path:
    """Trains with checkpoints, kills the run within a save; returns the newest whole checkpoint."""
    checkpoints = work / "checkpoints"
    torn = checkpoints / checkpoint_name(KILL_IN_SAVE_OF)
    arguments = ["--steps", str(STEPS), "--checkpoints", checkpoints]
    arguments += ["--save-every", str(SAVE_EVERY), "--losses", work / "killed.jsonl"]
    with TrainingRun(RANKS, arguments) as run:
        run.wait_until(lambda: is_complete(checkpoints / checkpoint_name(SAVE_EVERY)))
        # Looked up beforehand: a save takes some hundredths of a second, the search a part of that.
        victims = run.processes()
        run.wait_until(lambda: torn.is_dir() and any(torn.iterdir()))
        run.kill(victims)
    reached = max(read_losses(work / "killed.jsonl"))
    print(f"   SIGKILL to {len(victims)} processes after step {reached}; on disk:")
    complete = []
    for checkpoint in sorted(checkpoints.iterdir()):
        whole = is_complete(checkpoint)
        print(f"   {checkpoint.name}  {'complete' if whole else 'torn: it has no .metadata'}")
        if whole:
            complete.append(checkpoint)
    if not complete:
        raise DemoError("no complete checkpoint is left to resume from")
    return complete[-1]


def compare_losses(expected: dict[int, float], resumed: dict[int, float], first: int) -> None:
    """Holds the resumed run's losses against the uninterrupted run's; raises DemoError."""
    steps = range(first, STEPS + 1)
    if list(resumed) != list(steps):
        raise DemoError(
            f"the resumed run has the losses of steps {list(resumed)}, not of {first} to {STEPS}"
        )
    print(f"   step  never interrupted   resumed on {RANKS_AFTER} ranks")
    for number in (first, (first + STEPS) // 2, STEPS):
        print(f"   {number:4d}  {expected[number]:.15f}   {resumed[number]:.15f}")
    differences = [abs(resumed[n] - expected[n]) / abs(expected[n]) for n in steps]
    print(
        f"   largest relative difference over all {len(steps)} steps: {max(differences):.1e}",
        end="",
    )
    print(f" (allowed: {TOLERANCE:.0e})")
    # Not by the maximum, which passes over a NaN.
    if not all(difference <= TOLERANCE for difference in differences):
        raise DemoError("the resumed run did not go on where the killed run was")


def list_checkpoint(checkpoint: Path, lines: int = 12) -> None:
    """Prints the first lines of ``torch-ckpt ls`` and its total. Raises DemoError when ls fails."""
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

    The optimizer's moments are filled with random numbers: untouched zeros would all lie in one
    page of memory and cost less to read than a real state does.
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
    """Saves into a fresh directory, removes it, and returns the seconds of the save alone."""
    begin = time.perf_counter()
    dcp.save(state, checkpoint_id=directory, storage_writer=writer, no_dist=True)
    seconds = time.perf_counter() - begin
    shutil.rmtree(directory)
    return seconds


def time_saves(work: Path) -> None:
    """Prints one line: how long a save takes with torch_ckpt and with the stock writer.

    All writers fsync (their default). The stock writer runs as it comes, which is with one thread,
    and with a thread per core, up to 8. A round has one save with each; the order changes from
    round to round, so that none always meets the disk in the state the same other one left it in.
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
    names = list(contenders)  # the save above was to warm up, and to show the progress bar
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
        f"stock {medians['stock']:.2f} s as it comes ({ratio('stock'):.2f} times ours), "
        f"{medians['threaded']:.2f} s with {threads} threads ({ratio('threaded'):.2f} times ours); "
        f"fsync on, medians of {ROUNDS} alternating rounds"
    )


def demo(work: Path) -> None:
    """Runs all steps in `work`. Raises DemoError at the first that goes wrong."""
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

    step(1, f"Train {STEPS} steps on {RANKS} ranks; nothing happens to this run.")
    arguments = ["--steps", str(STEPS), "--losses", work / "uninterrupted.jsonl"]
    with TrainingRun(RANKS, arguments) as run:
        print(f"   {run.finish():.0f} s")

    step(
        2,
        f"Train again with a checkpoint every {SAVE_EVERY} steps; kill it hard while it saves step "
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

    step(5, f"Look into the checkpoint: torch-ckpt ls {checkpoint.name}")
    list_checkpoint(checkpoint)

    step(6, "Time a larger save beside the stock writer.")
    time_saves(work)


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """Makes a directory below build/demo, on the disk one works on; removes it at the end."""
    parent = Path("build", "demo")
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


def main() -> int:
    """Runs the demo and returns its exit code."""
    # A polite kill must end the training run and remove the directory, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Saving from a single process without a process group is what the timing means to do.
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
    print(f"\nAll well, in {time.monotonic() - begin:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
