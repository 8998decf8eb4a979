"""Scripts that install what a checkout needs: the environment and the system packages."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layers import REPOSITORY

pytest.importorskip("tomllib")

#: Writes what pip would install: a module, and commands in both of pip's forms.
_PIP = """
import json, os, signal, sys, sysconfig
from pathlib import Path

arguments = sys.argv[1:]
with open(os.environ["PIP_CALLS"], "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
if "dev" in arguments:
    Path(sysconfig.get_path("purelib"), "shared_module.py").touch()
    long = f"#!/bin/sh\\n'''exec' \\"{sys.executable}\\" \\"$0\\" \\"$@\\"\\n' '''\\n"
    for name, header in (("short", f"#!{sys.executable}\\n"), ("long", long)):
        command = Path(sys.prefix, "bin", name)
        command.write_text(header + "import sys, shared_module; print(sys.prefix, sys.argv[1])\\n")
        command.chmod(0o755)
    Path(sys.prefix, "bin", "binary").write_bytes(b"\\x7fELF\\0\\0")
if "--log" in arguments and "PIP_LOG" in os.environ:
    Path(arguments[arguments.index("--log") + 1]).write_text(os.environ["PIP_LOG"])
    sys.exit(1)
if "--log" in arguments and "PIP_KILLED" in os.environ:
    os.killpg(0, signal.SIGKILL)
"""

#: Makes environments without pip, in a tenth of the time.
_VENV = """
import sys
del sys.modules["venv"], sys.path[sys.path.index(__file__.removesuffix("/venv/__main__.py"))]
import venv
venv.main([*sys.argv[1:], "--without-pip"])
"""


class Machine:
    """A cache of shared environments, and a pip that downloads nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "a cache" / "torch_ckpt"
        self.calls = folder / "calls"
        for module, program in (("pip", _PIP), ("venv", _VENV)):
            path = folder / "modules" / module
            path.mkdir(parents=True)
            (path / "__init__.py").touch()
            (path / "__main__.py").write_text(program)

    def checkout(self, name: str) -> Path:
        checkout = self.folder / name
        for file in ("pyproject.toml", "scripts/environment.sh"):
            (checkout / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / file, checkout / file)
        (checkout / "torch_ckpt").mkdir()
        (checkout / "torch_ckpt/__init__.py").touch()
        (checkout / "torch_ckpt/cli.py").write_text("def main(): print(__file__)\n")
        return checkout

    def start(
        self, checkout: Path, python: str | Path = sys.executable, **variables: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [checkout / "scripts/environment.sh", python, ".venv"],
            cwd=checkout,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(self.folder / "modules"),
                "XDG_CACHE_HOME": str(self.cache.parent),
                "PIP_CALLS": str(self.calls),
                **variables,
            },
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def make_environment(
        self, checkout: Path, python: str | Path = sys.executable, **variables: str
    ) -> tuple[int, str]:
        """Returns the exit status and the errors."""
        started = self.start(checkout, python, **variables)
        _, errors = started.communicate()
        return started.returncode, errors

    def installations(self) -> int:
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        return sum("dev" in json.loads(call) for call in calls)

    def environments(self) -> list[Path]:
        return sorted(self.cache.glob("environment-*"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def output(*command: str | Path) -> str:
    return subprocess.run(
        command, cwd="/", env={}, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_checkouts_share_the_packages_and_import_their_own_package(machine: Machine) -> None:
    checkouts = [machine.checkout("a checkout"), machine.checkout("other")]
    for checkout in checkouts:
        assert machine.make_environment(checkout) == (0, "")
    assert machine.installations() == 1
    (shared,) = machine.environments()
    for checkout in checkouts:
        venv = checkout / ".venv"
        assert (venv / ".ready").read_text() == f"{shared}\n"
        for command in ("short", "long"):
            assert output(venv / "bin" / command, "an argument") == f"{venv} an argument"
            assert output(venv / "bin/python", venv / "bin" / command, "x") == f"{venv} x"
        assert output(venv / "bin/torch-ckpt") == f"{checkout}/torch_ckpt/cli.py"
        assert (venv / "bin/binary").readlink() == shared / "bin/binary"


def test_an_activated_environment_is_made_again_from_the_same_packages(machine: Machine) -> None:
    checkout = machine.checkout("checkout")
    assert machine.make_environment(checkout) == (0, "")
    (checkout / ".venv/bin/added").touch()
    for activated in (checkout, machine.checkout("other")):
        python = checkout / ".venv/bin/python3"
        assert machine.make_environment(activated, python) == (0, "")
        assert output(activated / ".venv/bin/short", "x") == f"{activated}/.venv x"
    assert not (checkout / ".venv/bin/added").exists()
    assert machine.installations() == 1


def test_a_folder_that_the_script_did_not_make_is_kept(machine: Machine) -> None:
    checkout = machine.checkout("checkout")
    kept = checkout / ".venv/bin/python"
    kept.parent.mkdir(parents=True)
    kept.touch()
    status, errors = machine.make_environment(checkout)
    assert status == 1
    assert errors == (
        "environment.sh: .venv was not made by this script: delete it, or choose another folder "
        "(make VENV=FOLDER)\n"
    )
    assert kept.exists()
    assert not machine.installations()


_NO_MATCH = "ERROR: No matching distribution found for megatron-core\n"


@pytest.mark.parametrize(
    "log",
    [
        "Could not fetch URL https://pypi.org/simple/megatron-core/: connection error: timed out "
        f"- skipping\n{_NO_MATCH}",
        "ERROR: connection broken\n",
    ],
)
def test_an_installation_that_lost_the_network_is_not_kept(machine: Machine, log: str) -> None:
    checkout = machine.checkout("checkout")
    status, errors = machine.make_environment(checkout, PIP_LOG=log)
    assert status == 1
    assert errors == (
        "environment.sh: could not download the packages of group megatron: run the command again\n"
    )
    assert not machine.environments()
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    "log",
    [
        _NO_MATCH,
        "Could not fetch URL https://mirror/megatron-core/: 404 Client Error: Not Found for url: "
        f"https://mirror/megatron-core/ - skipping\n{_NO_MATCH}",
    ],
)
def test_packages_that_the_index_lacks_are_left_out(machine: Machine, log: str) -> None:
    status, errors = machine.make_environment(machine.checkout("checkout"), PIP_LOG=log)
    assert status == 0
    assert errors.count("the tests with these packages will skip") == 3
    assert len(machine.environments()) == 1


def test_a_killed_installation_is_deleted_by_the_next_one(machine: Machine) -> None:
    checkout = machine.checkout("checkout")
    status, _ = machine.make_environment(checkout, PIP_KILLED="1")
    assert status == -signal.SIGKILL
    assert [left.suffix for left in machine.environments()] == [".new"]
    with (checkout / "scripts/environment.sh").open("a") as script:
        script.write("# Another version.\n")
    assert machine.make_environment(checkout) == (0, "")
    (shared,) = machine.environments()
    assert (checkout / ".venv/.ready").read_text() == f"{shared}\n"
    assert machine.installations() == 2


def test_two_checkouts_at_once_install_once(machine: Machine) -> None:
    started = [machine.start(machine.checkout(name)) for name in ("one", "two")]
    assert [process.communicate()[1] for process in started] == ["", ""]
    assert [process.returncode for process in started] == [0, 0]
    assert machine.installations() == 1


def commands_of_make(target: str, *options: str) -> str:
    """Returns what make would run."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(
        ["make", "-n", target, *options],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_make_repairs_an_environment_that_reads_deleted_packages(tmp_path: Path) -> None:
    shared, ready = tmp_path / "shared", tmp_path / ".ready"
    shared.mkdir()
    for content, is_repaired in ((f"{shared}\n", False), ("", True), (f"{shared}-1\n", True)):
        ready.write_text(content)
        commands = commands_of_make(str(ready), f"VENV={tmp_path}")
        assert ("environment.sh" in commands) == is_repaired, content


def test_make_wheel_asks_for_the_packages_of_the_build() -> None:
    commands = commands_of_make("wheel", "PYTHON=python3.12").splitlines()
    assert commands == [
        'scripts/packages.sh "python3.12" wheel',
        'scripts/wheel.sh "python3.12" dist',
    ]


@pytest.mark.parametrize(
    ("lacking", "purpose", "missing"),
    [
        ("gtest", ["wheel"], None),
        ("gtest", [], "cmake ninja-build clang-tidy libgtest-dev strace"),
        ("isa-l", ["wheel"], "libisal-dev"),
    ],
)
def test_a_wheel_needs_no_packages_of_the_tests(
    tmp_path: Path, lacking: str, purpose: list[str], missing: str | None
) -> None:
    """The machine has a compiler that finds all headers but one, and no package manager."""
    for name in ("bash", "id"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    compiler = tmp_path / "g++"
    compiler.write_text(
        f'#!/bin/sh\nread include\ncase "$include" in *{lacking}*) exit 1 ;; esac\n'
    )
    compiler.chmod(0o755)
    done = subprocess.run(
        ["bash", REPOSITORY / "scripts/packages.sh", sys.executable, *purpose],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == (missing is not None)
    assert done.stderr == (
        f"torch_ckpt: please install first: {missing} (Debian's names; Boost 1.78 or newer)\n"
        if missing
        else ""
    )
