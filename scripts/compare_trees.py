"""Measures the cost of a change: compares this tree with another tree of torch_ckpt.

    git worktree add ../before COMMIT && (cd ../before && make build)
    python -m scripts.compare_trees ../before --size 2GB --rounds 7 --out build/trees.json

In each round each tree saves and loads in a new process; both use the same state and disk. With
--dtensors, two gloo ranks save and load DTensors instead, sharded by rows, with 1 KiB of each on
every rank; seconds are the slower rank's. A ratio is this tree's seconds divided by the other
tree's in one round. The spread of the ratios shows their accuracy.

Each round needs new processes: of two processes of one tree, one used a sixth more CPU time than
the other during their whole life.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.fresh_process import environment_of, start_store

THIS_TREE = Path(__file__).parents[1]
_RUNS = 3  # of each job by each tree in a round, alternately; the median counts


def work(size: int, small: int, dtensors: Sequence[int], folder: str) -> None:
    """Runs in one tree's process: reads jobs from stdin, prints wall and CPU seconds of each."""
    import torch.distributed as dist  # first, for torch's libraries
    from torch.distributed.device_mesh import init_device_mesh

    import torch_ckpt
    from benchmarks import measure, pagecache, states

    directory = Path(folder)
    settings: dict[str, Any] = {} if dtensors else {"no_dist": True}

    def files(name: str) -> list[Path]:
        return sorted(path for path in (directory / name).iterdir() if path.is_file())

    def save(name: str, state: states.State) -> Callable[[], object]:
        shutil.rmtree(directory / name, ignore_errors=True)
        return lambda: torch_ckpt.save(state, directory / name, **settings)

    def load(name: str, state: states.State, is_warm: bool) -> Callable[[], object]:
        if is_warm:
            # The kernel may be reclaiming pages; then a later attempt keeps them.
            for _ in range(3):
                with contextlib.suppress(pagecache.CacheStateError):
                    pagecache.warm(files(name))
                    break
        else:
            pagecache.evict(files(name))
        return lambda: torch_ckpt.load(state, directory / name, **settings)

    jobs: dict[str, Callable[[], Callable[[], object]]] = {}

    def add_jobs(title: str, state: states.State, *, is_large: bool = False) -> None:
        jobs[f"save {title}"] = lambda: save(title, state)
        jobs[f"load {title}, warm page cache"] = lambda: load(title, state, True)
        if is_large:
            jobs[f"load {title}, cold page cache"] = lambda: load(title, state, False)

    ready: Callable[[], object] = lambda: None  # noqa: E731
    if dtensors:
        dist.init_process_group("gloo")
        ready = dist.barrier
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for count in dtensors:
            whole = states.small_tensors_state(count, 1024 * dist.get_world_size())
            add_jobs(f"{count:,} DTensors", states.sharded(whole, mesh))
    else:
        add_jobs(f"{size / 1e9:g} GB", states.training_state(size, 120), is_large=True)
        add_jobs(f"{small:,} small tensors", states.small_tensors_state(small))
    print(json.dumps(list(jobs)), flush=True)
    for line in sys.stdin:
        run = jobs[json.loads(line)]()
        print(json.dumps(measure.time_once(run, ready)), flush=True)


class _Tree:
    """The processes, one for each rank, that import torch_ckpt from one tree."""

    def __init__(self, path: Path, work_of_rank: str, ranks: int, directory: Path) -> None:
        # The tree comes before the installed package. The benchmarks are always this tree's.
        paths = [str(path), str(THIS_TREE)]
        # Other benchmarks import names that the other tree may not have.
        code = f"from scripts.compare_trees import work; work({work_of_rank}, {str(directory)!r})"
        if path != THIS_TREE:
            code = f"import sys; import torch_ckpt; sys.path.remove({paths[0]!r}); {code}"
        environments: list[Mapping[str, str]] = [os.environ]
        if ranks > 1:
            self._store = start_store()
            environments = [
                os.environ | environment_of(rank, ranks, self._store.port) for rank in range(ranks)
            ]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={
                    **environment,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "PYTHONWARNINGS": "ignore",
                },
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for environment in environments
        ]
        self.jobs: list[str] = self._answers()[0]

    def run(self, job: str) -> tuple[float, float]:
        """Returns the wall seconds of the slowest rank, and the CPU seconds of all ranks."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        answers = self._answers()
        return max(wall for wall, _ in answers), sum(cpu for _, cpu in answers)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _answers(self) -> list[Any]:
        lines = []
        for process in self._processes:
            assert process.stdout is not None
            lines.append(process.stdout.readline())
        if not all(lines):
            raise RuntimeError("a process of a tree has failed; its error is printed above")
        return [json.loads(line) for line in lines]


def _commit_of(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _compare(
    other: Path, size: int, small: int, dtensors: list[int], rounds: int, directory: Path
) -> dict[str, Any]:
    from benchmarks import machine

    names = ("this", "other")
    with tempfile.TemporaryDirectory(dir=directory) as place:
        paths = [Path(place) / name for name in names]
        for path in paths:
            path.mkdir()
        samples: list[dict[str, Any]] = []
        for number in range(1, rounds + 1):
            order = [0, 1] if number % 2 else [1, 0]
            trees: dict[int, _Tree] = {}
            try:
                for index in order:
                    tree = (THIS_TREE, other)[index]
                    work_of_rank = f"{size}, {small}, {dtensors}"
                    trees[index] = _Tree(tree, work_of_rank, 2 if dtensors else 1, paths[index])
                jobs = trees[0].jobs
                # Warm up pools, imports and the disk's free blocks.
                for job in jobs:
                    for index in order:
                        trees[index].run(job)
                for job in jobs:
                    runs: dict[int, list[tuple[float, float]]] = {index: [] for index in order}
                    for _ in range(_RUNS):
                        for index in order:
                            runs[index].append(trees[index].run(job))
                    for index in order:
                        wall, cpu = map(statistics.median, zip(*runs[index], strict=True))
                        sample = {"job": job, "tree": names[index], "round": number}
                        samples.append({**sample, "wall_s": wall, "cpu_s": cpu})
            finally:
                for running in trees.values():
                    running.end()
    return {
        "machine": asdict(machine.describe(directory)),
        "this": _commit_of(THIS_TREE),
        "other": _commit_of(other),
        "bytes": size,
        "small_tensors": small,
        "dtensors": dtensors,
        "rounds": rounds,
        "samples": samples,
        "ratios": {job: _ratios(samples, job) for job in jobs},
    }


def _ratios(samples: list[dict[str, Any]], job: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for what in ("wall_s", "cpu_s"):
        by = {(s["tree"], s["round"]): s[what] for s in samples if s["job"] == job}
        rounds = sorted(number for tree, number in by if tree == "this")
        ratios = [by["this", number] / by["other", number] for number in rounds]
        found[what] = round(statistics.median(ratios), 4)
        found[f"least {what}"] = round(min(ratios), 4)
        found[f"most {what}"] = round(max(ratios), 4)
        found[f"median {what}"] = round(statistics.median(by["this", n] for n in rounds), 4)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the ratios."""
    from benchmarks.sizes import parse_size

    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_trees",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("other", type=Path, nargs="?", help="a built tree")
    parser.add_argument("--size", type=parse_size, default=2 * 10**9)
    parser.add_argument("--small-tensors", type=int, default=20_000)
    parser.add_argument("--dtensors", type=int, nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.other is None:
        parser.error("pass the path of another built tree")
    options.dir.mkdir(parents=True, exist_ok=True)
    found = _compare(
        options.other.resolve(),
        options.size,
        options.small_tensors,
        options.dtensors,
        options.rounds,
        options.dir.resolve(),
    )
    for job, ratios in found["ratios"].items():
        print(
            f"{job:40} {ratios['median wall_s']:7.3f} s  wall {ratios['wall_s']:.3f} "
            f"({ratios['least wall_s']:.3f} to {ratios['most wall_s']:.3f})  "
            f"CPU {ratios['cpu_s']:.3f} ({ratios['least cpu_s']:.3f} to {ratios['most cpu_s']:.3f})"
        )
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
