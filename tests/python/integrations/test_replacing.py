"""install() and uninstall() with small fake packages; test_peers.py has the real ones."""

from __future__ import annotations

import importlib
import inspect
import logging
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torch_ckpt import megatron, nvrx
from torch_ckpt.megatron import install, uninstall

pytestmark = pytest.mark.full

STRATEGIES = "megatron.core.dist_checkpointing.strategies"
ASYNC_CKPT = "nvidia_resiliency_ext.checkpointing.async_ckpt"
TOPS = ("megatron", "nvidia_resiliency_ext")

QUEUE = """
from collections import namedtuple

class AsyncCallsQueue:
    def __init__(self, persistent=False):
        self.persistent = persistent
        self.persistent_caller = None
        self.calls = 0

    def get_num_unfinalized_calls(self):
        return self.calls

AsyncRequest = namedtuple(
    "AsyncRequest",
    "async_fn async_fn_args finalize_fns async_fn_kwargs preload_fn is_frozen call_idx",
)
"""

WRITER = """
import torch.distributed.checkpoint

class FileSystemWriterAsync(torch.distributed.checkpoint.FileSystemWriter):
    def __init__(self, path, *args, separation_hint=None, use_msc=False, **kwargs):
        super().__init__(path)
        self.arguments = use_msc, kwargs

    def class_of_its_module(self):
        return FileSystemWriterAsync
"""
WRITER_NAME = "FileSystemWriterAsync"

FUNCTION = """
def {name}(*args, **kwargs):
    return __name__, args, kwargs
"""

#: Names that install() replaces in the modules of each package.
REPLACED = {
    STRATEGIES: {
        "async_utils": "AsyncCallsQueue AsyncRequest",
        "cached_metadata_filesystem_reader": "CachedMetadataFileSystemReader",
        "filesystem_async": "FileSystemWriterAsync get_write_results_queue",
        "state_dict_saver": "save_state_dict_async_finalize save_state_dict_async_plan",
    },
    ASYNC_CKPT: {
        "cached_metadata_filesystem_reader": "CachedMetadataFileSystemReader",
        "core": "AsyncCallsQueue AsyncRequest abort_nvrx_checkpoint",
        "filesystem_async": "FileSystemWriterAsync get_write_results_queue",
        "state_dict_saver": (
            "CheckpointMetadataCache get_metadata_caching_status init_checkpoint_metadata_cache"
            " save_state_dict_async_finalize save_state_dict_async_plan"
        ),
        "torch_ckpt": "AsyncCallsQueue AsyncRequest TorchAsyncCheckpoint",
    },
}

OURS = {STRATEGIES: megatron, ASYNC_CKPT: nvrx}

#: Sources of the names whose definition matters.
SOURCES = {"AsyncCallsQueue": QUEUE, "AsyncRequest": "", "FileSystemWriterAsync": WRITER}
SOURCES |= {
    name: FUNCTION.format(name=name)
    for name in ("save_state_dict_async_plan", "save_state_dict_async_finalize")
}

#: Source of each module.
MODULES = {
    package: {
        module: "\n".join(SOURCES.get(name, f"def {name}(): ...") for name in names.split())
        for module, names in modules.items()
    }
    for package, modules in REPLACED.items()
}
MODULES[ASYNC_CKPT]["torch_ckpt"] = """
from .core import AsyncCallsQueue, AsyncRequest
class TorchAsyncCheckpoint: ...
"""
MODULES[STRATEGIES]["base"] = """
from .async_utils import AsyncCallsQueue, AsyncRequest
async_calls = AsyncCallsQueue()
"""
MODULES[STRATEGIES]["torch"] = """
from .async_utils import AsyncRequest
from .cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from .filesystem_async import FileSystemWriterAsync
from .state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan
"""

#: Newer and older name. Only the name of the results queue has changed.
RESULTS_QUEUES = ["get_write_results_queue", "_get_write_results_queue"]


class Packages:
    """Finds packages in one directory only, whatever is installed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in TOPS:
            return None
        spec = PathFinder.find_spec(name, [str(self.directory)])
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return spec

    def write(self, package: str, modules: dict[str, str]) -> None:
        """Writes the modules of a package."""
        directory = self.directory / package.replace(".", "/")
        directory.mkdir(parents=True, exist_ok=True)
        while directory != self.directory:
            (directory / "__init__.py").touch()
            directory = directory.parent
        for name, source in modules.items():
            (self.directory / package.replace(".", "/") / f"{name}.py").write_text(source)

    def write_both(self, results_queue: str = RESULTS_QUEUES[0]) -> None:
        for package, modules in MODULES.items():
            sources = (
                source.replace(RESULTS_QUEUES[0], results_queue) for source in modules.values()
            )
            self.write(package, dict(zip(modules, sources, strict=True)))


@pytest.fixture
def no_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    def forget() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] in TOPS]
        return {name: sys.modules.pop(name) for name in names}

    real = forget()
    packages = Packages(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [packages, *sys.meta_path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield packages
    uninstall()
    forget()
    sys.modules.update(real)


@pytest.fixture
def packages(no_packages: Packages) -> Packages:
    no_packages.write_both()
    return no_packages


def imported(module: str) -> Any:
    return importlib.import_module(module)


def strategy(module: str) -> Any:
    return imported(f"{STRATEGIES}.{module}")


def all_names() -> dict[tuple[str, str], object]:
    """Returns all attributes of the packages' imported modules."""
    return {
        (title, name): value
        for title, module in sys.modules.items()
        if title.partition(".")[0] in TOPS
        for name, value in vars(module).items()
    }


@pytest.mark.parametrize("name", RESULTS_QUEUES)
def test_the_results_queue_is_replaced_under_its_old_and_new_name(
    packages: Packages, name: str
) -> None:
    packages.write_both(name)
    install()
    for package, ours in OURS.items():
        replaced = getattr(imported(f"{package}.filesystem_async"), name)
        assert replaced is ours.get_write_results_queue


def test_names_are_replaced_in_their_modules_and_each_has_a_line_which_is_logged(
    packages: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="torch_ckpt"):
        lines = install()
    assert [record.getMessage() for record in caplog.records] == [f"replaced {x}" for x in lines]
    expected = [
        (f"{package}.{module}", name, OURS[package])
        for package, modules in REPLACED.items()
        for module, names in modules.items()
        for name in names.split()
    ]
    assert lines == [
        f"{module}.{name} -> {ours.__name__}.{name}" for module, name, ours in expected
    ]
    for module, name, ours in expected:
        assert getattr(imported(module), name) is getattr(ours, name)


def test_names_imported_before_are_replaced(packages: Packages) -> None:
    request = f"from {ASYNC_CKPT}.core import AsyncRequest as Request"
    packages.write("megatron.training", {"saving": request})
    saving, of_strategies = imported("megatron.training.saving"), strategy("torch")
    lines = install()
    assert of_strategies.FileSystemWriterAsync is megatron.FileSystemWriterAsync
    assert saving.Request is nvrx.AsyncRequest
    assert "megatron.training.saving.Request -> torch_ckpt.nvrx.AsyncRequest" in lines


def test_a_name_that_another_package_has_imported_is_kept_and_reported(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = strategy("filesystem_async").FileSystemWriterAsync
    trainer = ModuleType("trainer")
    trainer.Writer = theirs
    monkeypatch.setitem(sys.modules, "trainer", trainer)
    install()
    assert trainer.Writer is theirs
    assert "trainer.Writer existed before install() and was not replaced" in caplog.text


def test_names_that_are_looked_up_at_each_save_are_ours(packages: Packages) -> None:
    """Newer Megatron-core does so, and then chooses between the two packages."""
    source = f"""
def get_async_strategy(name):
    if name == "nvrx":
        from {ASYNC_CKPT}.filesystem_async import FileSystemWriterAsync
    else:
        from .filesystem_async import FileSystemWriterAsync
    return {{"FileSystemWriterAsync": FileSystemWriterAsync}}
"""
    packages.write(STRATEGIES, {"torch": source})
    packages.write(
        "megatron.training", {"saving": f"from {STRATEGIES}.torch import get_async_strategy"}
    )
    get_async_strategy = imported("megatron.training.saving").get_async_strategy
    install()
    assert get_async_strategy("nvrx")["FileSystemWriterAsync"] is nvrx.FileSystemWriterAsync
    assert get_async_strategy("mcore")["FileSystemWriterAsync"] is megatron.FileSystemWriterAsync


def test_an_idle_queue_from_before_is_replaced(packages: Packages) -> None:
    base = strategy("base")
    install()
    assert type(base.async_calls) is megatron.AsyncCallsQueue


def test_a_queue_with_running_saves_is_kept_and_named(
    packages: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = strategy("base").async_calls
    theirs.calls = 1
    install()
    assert strategy("base").async_calls is theirs
    assert f"{STRATEGIES}.base.async_calls existed before install()" in caplog.text


def test_a_second_install_has_the_same_result(packages: Packages) -> None:
    strategy("torch")
    lines = install()
    names = all_names()
    assert install() == lines
    assert all_names() == names


def test_uninstall_restores_all_names_once(packages: Packages) -> None:
    for package, modules in MODULES.items():
        for module in modules:
            imported(f"{package}.{module}")
    before = all_names()
    lines = install()
    assert uninstall() == lines
    assert all_names() == before
    assert uninstall() == []


def test_uninstall_restores_names_imported_after_install(packages: Packages) -> None:
    theirs = strategy("filesystem_async").FileSystemWriterAsync
    install()
    of_strategies = strategy("torch")
    assert of_strategies.FileSystemWriterAsync is megatron.FileSystemWriterAsync
    lines = uninstall()
    assert of_strategies.FileSystemWriterAsync is theirs
    name = "FileSystemWriterAsync"
    assert f"{STRATEGIES}.torch.{name} -> torch_ckpt.megatron.{name}" in lines


def test_uninstall_keeps_what_other_code_has_replaced(
    packages: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    install()
    other = type("Other", (), {})
    strategy("filesystem_async").FileSystemWriterAsync = other
    uninstall()
    assert strategy("filesystem_async").FileSystemWriterAsync is other
    assert "other code has replaced it" in caplog.text


def test_our_queue_with_running_saves_is_restored_after_they_are_finalized(
    packages: Packages,
) -> None:
    base = strategy("base")
    theirs = base.async_calls
    install()
    ours = base.async_calls
    ours.schedule_async_request(
        megatron.AsyncRequest(async_fn=None, async_fn_args=(), finalize_fns=[])
    )
    uninstall()
    assert base.async_calls is ours
    assert ours.maybe_finalize_async_calls(blocking=True) == [0]
    uninstall()
    assert base.async_calls is theirs


@pytest.mark.parametrize("module", [f"{STRATEGIES}.async_utils", f"{ASYNC_CKPT}.core"])
def test_a_request_of_ours_is_a_request_of_theirs_in_their_worker(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """Nothing is installed in the worker, and it drops other requests silently."""
    for other in (f"{STRATEGIES}.async_utils", f"{ASYNC_CKPT}.core"):
        imported(other)
    sent = pickle.dumps(megatron.AsyncRequest(print, ("a",), [], call_idx=3))
    # The worker runs a function of the module that defines the class.
    worker = multiprocessing.Process(
        target=imported(module).AsyncCallsQueue.get_num_unfinalized_calls
    )
    monkeypatch.setattr(multiprocessing, "current_process", lambda: worker)
    received = pickle.loads(sent)
    assert type(received) is imported(module).AsyncRequest
    assert received == megatron.AsyncRequest(print, ("a",), [], call_idx=3)


def test_a_request_of_ours_is_ours_in_other_processes(packages: Packages) -> None:
    strategy("async_utils")
    received = pickle.loads(pickle.dumps(megatron.AsyncRequest(None, (), [])))
    assert type(received) is megatron.AsyncRequest


def test_without_the_packages_nothing_is_replaced_and_a_warning_is_given(
    no_packages: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    assert install() == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Megatron-core is not installed" in record.getMessage()
    assert "nvidia-resiliency-ext is not installed" in record.getMessage()


@pytest.mark.parametrize(
    ("package", "module", "source", "text", "other"),
    [
        (
            STRATEGIES,
            "__init__",
            "assert False, 'Minimum required nvrx is 0.6.0'",
            "not replaced: Megatron-core cannot be imported: "
            "AssertionError: Minimum required nvrx is 0.6.0",
            ASYNC_CKPT,
        ),
        (
            ASYNC_CKPT,
            "filesystem_async",
            "import there_is_no_such_module",
            "not replaced: nvidia-resiliency-ext cannot be imported: "
            "ModuleNotFoundError: No module named 'there_is_no_such_module'",
            STRATEGIES,
        ),
    ],
    ids=["a failure", "a missing dependency"],
)
def test_a_package_that_fails_to_import_is_named_with_the_reason_and_the_other_is_replaced(
    packages: Packages,
    caplog: pytest.LogCaptureFixture,
    package: str,
    module: str,
    source: str,
    text: str,
    other: str,
) -> None:
    packages.write(package, {module: source})
    with caplog.at_level(logging.INFO, logger="torch_ckpt"):
        lines = install()
    assert lines
    assert all(line.startswith(other) for line in lines)
    assert text in caplog.text


def test_a_version_without_a_module_gets_the_other_replacements(packages: Packages) -> None:
    (packages.directory / ASYNC_CKPT.replace(".", "/") / "torch_ckpt.py").unlink()
    lines = install()
    assert f"{ASYNC_CKPT}.core.AsyncRequest -> torch_ckpt.nvrx.AsyncRequest" in lines
    assert "TorchAsyncCheckpoint" not in "".join(lines)


def test_options_of_the_writer_override_megatrons_arguments_and_keep_the_signature(
    packages: Packages, tmp_path: Path
) -> None:
    install(writer={"thread_count": 3})
    for package, ours in OURS.items():
        replaced = imported(f"{package}.filesystem_async").FileSystemWriterAsync
        assert replaced(tmp_path, thread_count=1).thread_count == 3
        # Megatron reads the options from the signature.
        assert inspect.signature(replaced) == inspect.signature(ours.FileSystemWriterAsync)


BEYOND_THE_ENGINE: list[dict[str, Any]] = [
    {"use_msc": True},
    {"open_file": print},
    {"_extensions": ["a transform"]},
]


@pytest.mark.parametrize("arguments", BEYOND_THE_ENGINE, ids=lambda given: next(iter(given)))
@pytest.mark.parametrize("options", [{}, {"thread_count": 3}], ids=["no options", "options"])
def test_the_original_class_is_constructed_for_what_the_engine_cannot_write(
    packages: Packages, tmp_path: Path, arguments: dict[str, Any], options: Any
) -> None:
    for package, ours in OURS.items():
        module = imported(f"{package}.filesystem_async")
        install(writer=options)
        writer = module.FileSystemWriterAsync(tmp_path, **arguments)
        assert (type(writer).__module__, type(writer).__name__) == (module.__name__, WRITER_NAME)
        assert writer.class_of_its_module() is type(writer)
        others = {name: value for name, value in arguments.items() if name != "use_msc"}
        assert writer.arguments == (arguments.get("use_msc", False), others)
        assert isinstance(module.FileSystemWriterAsync(tmp_path), ours.FileSystemWriterAsync)
        uninstall()
        with pytest.raises(ValueError, match="the engine cannot write"):
            ours.FileSystemWriterAsync(tmp_path, **arguments)


def test_functions_pass_writers_of_the_original_class_to_the_original_functions(
    packages: Packages, tmp_path: Path
) -> None:
    install()
    for package in OURS:
        writer = imported(f"{package}.filesystem_async").FileSystemWriterAsync(
            tmp_path, use_msc=True
        )
        saver = f"{package}.state_dict_saver"
        plan = imported(saver).save_state_dict_async_plan
        assert plan({}, writer, enable=1) == (saver, ({}, writer), {"enable": 1})
        assert plan({}, storage_writer=writer) == (saver, ({},), {"storage_writer": writer})
        finalize = imported(saver).save_state_dict_async_finalize
        assert finalize(writer, None, None) == (saver, (writer, None, None), {})


def test_options_of_the_reader_reach_it(packages: Packages, tmp_path: Path) -> None:
    install(reader={"allow_pickle": True})
    reader = strategy("cached_metadata_filesystem_reader").CachedMetadataFileSystemReader
    assert reader(tmp_path).options.allow_pickle


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: install(writer={"threads": 3}), TypeError, "no option 'threads'"),
        (lambda: install(reader={"pickle": True}), TypeError, "no option 'pickle'"),
        (lambda: install(writer={"path": "/"}), TypeError, "no option 'path'"),
        (lambda: install(writer={"thread_count": 0}), ValueError, "thread_count"),
    ],
    ids=["of the writer", "of the reader", "not an option", "a value"],
)
def test_a_refused_option_replaces_nothing(
    packages: Packages, call: Callable[[], object], error: type[Exception], message: str
) -> None:
    theirs = imported(f"{STRATEGIES}.filesystem_async").FileSystemWriterAsync
    with pytest.raises(error, match=message):
        call()
    assert strategy("filesystem_async").FileSystemWriterAsync is theirs
