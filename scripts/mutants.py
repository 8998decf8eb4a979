"""Mutation testing: makes small wrong changes, one at a time, and lists those that no test detects.

    scripts/mutants.py --seed 1 --count 60 --results build/mutants.json

1. A mutant changes one line outside comments and strings: it moves a bound by one, inverts a
   comparison or a condition, or removes a check. Half of the mutants are in csrc, half in
   torch_ckpt.
2. Each mutant is applied to a copy of the tree, and C++ is built there. If it does not compile, it
   is skipped.
3. The tests of `make test` run until one fails, starting with those of the changed package and
   those that name the changed module. A failure counts only if the same test fails again on its
   own, so that a busy machine detects nothing. A mutant survives if no test detects it in
   ``--seconds``.
4. The other tests of `make test-full` run on the mutants that survived.

``--mutants FILE`` repeats the mutants of an earlier run's results if their lines still exist, to
compare two versions of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

#: Pairs of a regular expression and its replacement.
COMMON = [
    (r" < ", " <= "),
    (r" <= ", " < "),
    (r" > ", " >= "),
    (r" >= ", " > "),
    (r" == ", " != "),
    (r" != ", " == "),
    (r" \+ 1\b", " + 2"),
    (r" - 1\b", " - 0"),
    (r"\bmin\(", "max("),
    (r"\bmax\(", "min("),
]
CPP = [
    *COMMON,
    (r" && ", " || "),
    (r" \|\| ", " && "),
    (r"\bif \(!", "if ("),
    (r"\breturn true;", "return false;"),
    (r"\breturn false;", "return true;"),
    (r"^ *if \([^{]*\) return[^{]*;$", ""),
    (r"^ *if \([^{]*\) continue;$", ""),
]
PYTHON = [
    *COMMON,
    (r" and ", " or "),
    (r" or ", " and "),
    (r"\bif not ", "if "),
    (r" is not None\b", " is None"),
    (r" is None\b", " is not None"),
    (r"\breturn True$", "return False"),
    (r"\breturn False$", "return True"),
    (r"\b(raise|continue)\b.*[^(,]$", "pass"),
]

#: Three times as long as the slowest Python test, and as all C++ tests together.
HANGS_AFTER_SECONDS = 90

#: The tests of each lane, by marker, in the order of running.
LANES = {"test": "not full", "test-full": "full"}


@dataclass(frozen=True)
class Mutant:
    """One changed line. If several lines of its file are equal, ``nth`` is its index."""

    file: str
    nth: int
    before: str
    after: str

    @classmethod
    def of_result(cls, result: dict[str, Any]) -> Mutant:
        """Makes the mutant of an entry in the results."""
        return cls(result["file"], result["nth"], result["before"], result["after"])

    def apply(self, root: Path) -> bool:
        """Changes the line. Returns False if the line no longer exists."""
        path = root / self.file
        lines = path.read_text().split("\n") if path.exists() else []
        places = [number for number, line in enumerate(lines) if line == self.before]
        if self.nth >= len(places):
            return False
        lines[places[self.nth]] = self.after
        path.write_text("\n".join(lines))
        return True


def candidates(path: Path) -> Iterator[Mutant]:
    """Yields all mutants of a file."""
    lines = path.read_text().split("\n")
    rules = PYTHON if path.suffix == ".py" else CPP
    code = python_code(path) if path.suffix == ".py" else cpp_code(lines)
    for number, (line, visible) in enumerate(zip(lines, code, strict=True)):
        if re.match(r"\s*(from|import|class|def|#|template|static_assert|@)", visible):
            continue
        for pattern, replacement in rules:
            for match in re.finditer(pattern, visible):
                after = line[: match.start()] + replacement + line[match.end() :]
                nth = lines[:number].count(line)
                yield Mutant(str(path.relative_to(ROOT)), nth, line, after)


def cpp_code(lines: list[str]) -> list[str]:
    """Replaces comments and strings in lines of C++ by blanks."""

    def blank(match: re.Match[str]) -> str:
        return " " * len(match.group())

    return [re.sub(r'"(\\.|[^"\\])*"|//.*|^\s*///?.*', blank, line) for line in lines]


def python_code(path: Path) -> list[str]:
    """Replaces comments and strings in a Python file by blanks; returns its lines."""
    code = [list(line) for line in path.read_text().split("\n")]
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in (tokenize.STRING, tokenize.COMMENT):
                continue
            (row, begin), (end_row, end) = token.start, token.end
            for at in range(row, end_row + 1):
                line = code[at - 1]
                first = begin if at == row else 0
                last = end if at == end_row else len(line)
                line[first:last] = " " * (last - first)
    return ["".join(line) for line in code]


CMAKE = ["cmake", "-G", "Ninja", "-S", ".", "-DCMAKE_BUILD_TYPE=Release"]


class DoesNotCompile(Exception):
    """The mutant does not compile."""


class Copy:
    """A copy of the tree with its own builds."""

    def __init__(self, root: Path, python: str) -> None:
        self.root = root
        self._python = python
        if not root.exists():
            git("worktree", "add", "--detach", str(root))
        self.reset()
        # An earlier run may have made the copy from another commit.
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
        self._git("checkout", "-q", "--detach", commit)

    def reset(self) -> None:
        self._git("checkout", "-q", ".")

    def _git(self, *arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=self.root, check=True)

    def restore(self, mutant: Mutant) -> None:
        """Undoes the mutant, and builds the copy again."""
        self.reset()
        if mutant.file.startswith("csrc"):
            self.build()

    def build(self) -> bool:
        """Builds the tests and the extension. Returns False if they do not compile."""
        return self._build_tests() and self._build_extension()

    def first_failure(self, mutant: Mutant, lane: str, seconds: float) -> str | None:
        """Returns the test of the lane that detects the mutant, or another failure; None if it
        survives.

        Raises:
            DoesNotCompile: the mutant does not compile.
        """
        until = time.monotonic() + seconds
        if mutant.file.startswith("csrc"):
            is_core = not mutant.file.startswith(("csrc/python", "csrc/torch", "csrc/torch_python"))
            is_tested = is_core and lane == "test"
            if is_tested and not self._build_tests():
                raise DoesNotCompile
            failed = self._failed_cpp_test() if is_tested else None
            if failed is not None:
                return failed
            if not self._build_extension():
                raise DoesNotCompile
        for marker, parallel, files in self._runs(mutant, LANES[lane]):
            failed = self._failed_python_test(marker, parallel, files, until)
            if failed is not None:
                return failed
        return None

    def _failed_cpp_test(self) -> str | None:
        """Returns the C++ test that fails twice, or another failure; None if all pass."""
        tests = ["build/test/torch_ckpt_tests", "--gtest_brief=1", "--gtest_fail_fast"]
        for _ in range(2):
            code, output = self._run(tests, HANGS_AFTER_SECONDS)
            if code == 0:
                return None
        failed = re.search(r"FAILED +\] (\S+?),? ", output)
        return failed.group(1) if failed else f"exit {code} of the C++ tests"

    def _failed_python_test(
        self, marker: str, parallel: list[str], files: list[str], until: float
    ) -> str | None:
        """Returns the Python test that fails, and fails again on its own; None if there is none
        until the time ``until`` of the monotonic clock."""
        # A test that hangs detects the mutant, too.
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={HANGS_AFTER_SECONDS}"]
        passed_alone = [FAILS_IN_A_COPY]
        while (left := until - time.monotonic()) > 0:
            deselected = [f"--deselect={test}" for test in passed_alone]
            pytest = [self._python, "-m", "pytest", "-m", marker, *options]
            code, output = self._run([*pytest, *deselected, *parallel, *files], left)
            if code in (0, 5) or (code == TIMED_OUT and time.monotonic() >= until):
                return None
            found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
            failed = found.group(1) if found else None
            if failed is None or "::" not in failed:
                return failed or f"exit {code} of {files[0]}"
            code, _ = self._run([*pytest, failed], 2 * HANGS_AFTER_SECONDS)
            if code not in (0, 5):
                return failed
            passed_alone.append(failed)
        return None

    def _build_tests(self) -> bool:
        configure = [*CMAKE, "-B", "build/test", "-DTORCH_CKPT_BUILD_TESTS=ON"]
        return self._succeed(configure, ["cmake", "--build", "build/test"])

    def _build_extension(self) -> bool:
        configure = [
            *(*CMAKE, "-B", "build/extension", "-DTORCH_CKPT_BUILD_PYTHON=ON"),
            *(f"-DPython_EXECUTABLE={self._python}", f"-DCMAKE_INSTALL_PREFIX={self.root}"),
        ]
        build = ["cmake", "--build", "build/extension"]
        return self._succeed(configure, build, ["cmake", "--install", "build/extension"])

    def _succeed(self, *commands: list[str]) -> bool:
        return all(self._run(command, 3600)[0] == 0 for command in commands)

    def _runs(self, mutant: Mutant, lane: str) -> Iterator[tuple[str, list[str], list[str]]]:
        """Yields the marker, the options and the files of each run of pytest."""
        files = sorted((self.root / "tests").rglob("test_*.py"))
        changed = Path(mutant.file)
        name = re.compile(rf"\b{changed.stem}\b|test_{changed.stem}")
        near = [
            file
            for file in files
            if file.parent.name == changed.parent.name
            or name.search(file.name)
            or name.search(file.read_text())
        ]
        for group in (near, [file for file in files if file not in near]):
            names = [str(file.relative_to(self.root)) for file in group]
            if names:
                # As `make py-test` does for all files.
                beside = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
                yield f"({lane}) and not alone", beside, names
                if lane == "full":
                    yield "full and alone", [], names

    def _run(self, command: list[str], seconds: float) -> tuple[int, str]:
        try:
            ended = subprocess.run(
                command,
                cwd=self.root,
                env=os.environ | {"PYTHONPATH": str(self.root)},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return TIMED_OUT, ""
        return ended.returncode, ended.stdout + ended.stderr


TIMED_OUT = 124

#: Compares the environment, which belongs to the checkout, with the copy.
FAILS_IN_A_COPY = (
    "tests/python/project/test_tools.py::test_the_environment_imports_the_package_of_this_checkout"
)


def git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=ROOT, check=True)


def chosen(seed: int) -> Iterator[Mutant]:
    """Yields mutants in random order, alternately in csrc and in torch_ckpt."""
    choice = random.Random(seed)
    places = [
        [path for path in sorted((ROOT / "csrc").rglob("*.cpp")) if "cuda" not in path.name],
        sorted((ROOT / "torch_ckpt").rglob("*.py")),
    ]
    pools = [[mutant for path in paths for mutant in candidates(path)] for paths in places]
    for pool in pools:
        choice.shuffle(pool)
    for pair in zip(*pools, strict=False):
        yield from pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=900, help="for the tests of one mutant")
    parser.add_argument(
        "--results", type=Path, required=True, help="a JSON file; an existing one is resumed"
    )
    parser.add_argument("--mutants", type=Path, help="results whose mutants are repeated")
    parser.add_argument("--copy", type=Path, default=ROOT / "build" / "mutants")
    arguments = parser.parse_args()

    results = Results(arguments.results)
    if arguments.mutants is not None:
        earlier = json.loads(arguments.mutants.read_text())
        mutants: Iterator[Mutant] = map(Mutant.of_result, earlier)
    else:
        mutants = chosen(arguments.seed)
    copy = Copy(arguments.copy.resolve(), sys.executable)
    if not copy.build():
        sys.exit("the tree does not build without a mutant")
    try_mutants(copy, mutants, "test", results, arguments)
    survivors = [Mutant.of_result(result) for result in results.survivors()]
    try_mutants(copy, iter(survivors), "test-full", results, arguments)
    print(f"seed {arguments.seed}: of {len(results.all)} mutants, {results.summary()}")


class Results:
    """The outcome of each mutant, in a JSON file, so that an interrupted run can be resumed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.all: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def has(self, mutant: Mutant, lane: str) -> bool:
        """True if the lane has been tried on the mutant."""
        return any(
            Mutant.of_result(result) == mutant and lane in result["tried"] for result in self.all
        )

    def add(self, mutant: Mutant, lane: str, detected_by: str | None, seconds: int) -> None:
        """Records the outcome of one lane."""
        for result in self.all:
            if Mutant.of_result(result) == mutant:
                result["tried"].append(lane)
                result["caught_by"] = detected_by
                result["seconds"] += seconds
                break
        else:
            new = {"tried": [lane], "caught_by": detected_by, "seconds": seconds}
            self.all.append({**asdict(mutant), **new})
        self._path.write_text(json.dumps(self.all, indent=1) + "\n")

    def survivors(self) -> list[dict[str, Any]]:
        """Returns the results of the mutants that no test has detected."""
        return [result for result in self.all if result["caught_by"] is None]

    def summary(self) -> str:
        """Returns how many mutants each lane detects."""
        detected = Counter(
            result["tried"][-1] for result in self.all if result["caught_by"] is not None
        )
        first = detected["test"]
        return f"make test detects {first}, make test-full {first + detected['test-full']}"


def try_mutants(
    copy: Copy,
    mutants: Iterator[Mutant],
    lane: str,
    results: Results,
    arguments: argparse.Namespace,
) -> None:
    """Runs the tests of a lane on each mutant, until the results have enough mutants."""
    for mutant in mutants:
        if lane == "test" and len(results.all) == arguments.count:
            break
        if results.has(mutant, lane):
            continue
        if not mutant.apply(copy.root):
            print(f"no such line: {mutant.file}: {mutant.before.strip()}", flush=True)
            continue
        begun = time.monotonic()
        try:
            detected_by = copy.first_failure(mutant, lane, arguments.seconds)
        except DoesNotCompile:
            copy.restore(mutant)
            continue
        results.add(mutant, lane, detected_by, round(time.monotonic() - begun))
        print(f"{detected_by or f'survived make {lane}'}: {mutant.file}", flush=True)
        print(f"-{mutant.before}\n+{mutant.after}", flush=True)
        copy.restore(mutant)


if __name__ == "__main__":
    main()
