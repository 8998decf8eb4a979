"""install() and uninstall() with small fake packages; test_peers.py has the real ones."""

from __future__ import annotations

import importlib
import inspect
import logging
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
class FileSystemWriterAsync:
    def __init__(self, path, *args, separation_hint=None, use_msc=False, **kwargs): ...
"""

#: Relative to the strategies. Only the name of the results queue has changed.
MEGATRON_CORE = {
    "filesystem_async": f"{WRITER}\ndef RESULTS_QUEUE(): ...",
    "async_utils": QUEUE,
    "state_dict_saver": """
def save_state_dict_async_plan(): ...
def save_state_dict_async_finalize(): ...
""",
    "cached_metadata_filesystem_reader": "class CachedMetadataFileSystemReader: ...",
    "base": """
from .async_utils import AsyncCallsQueue, AsyncRequest
async_calls = AsyncCallsQueue()
""",
    "torch": """
from .async_utils import AsyncRequest
from .cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from .filesystem_async import FileSystemWriterAsync
from .state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan
""",
}

NVRX = {
    "filesystem_async": f"{WRITER}\ndef RESULTS_QUEUE(): ...",
    "core": f"{QUEUE}\ndef abort_nvrx_checkpoint(): ...",
    "state_dict_saver": """
class CheckpointMetadataCache: ...
def init_checkpoint_metadata_cache(): ...
def get_metadata_caching_status(): ...
def save_state_dict_async_plan(): ...
def save_state_dict_async_finalize(): ...
""",
    "torch_ckpt": """
from .core import AsyncCallsQueue, AsyncRequest
class TorchAsyncCheckpoint: ...
""",
    "cached_metadata_filesystem_reader": "class CachedMetadataFileSystemReader: ...",
}

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
        for package, modules in ((STRATEGIES, MEGATRON_CORE), (ASYNC_CKPT, NVRX)):
            self.write(
                package,
                {
                    n: source.replace("RESULTS_QUEUE", results_queue)
                    for n, source in modules.items()
                },
            )


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


def test_names_are_replaced_in_the_modules_that_define_them(packages: Packages) -> None:
    install()
    assert strategy("filesystem_async").FileSystemWriterAsync is megatron.FileSystemWriterAsync
    assert strategy("async_utils").AsyncCallsQueue is megatron.AsyncCallsQueue
    of_nvrx = imported(f"{ASYNC_CKPT}.filesystem_async")
    assert of_nvrx.FileSystemWriterAsync is nvrx.FileSystemWriterAsync
    cache = imported(f"{ASYNC_CKPT}.state_dict_saver").CheckpointMetadataCache
    assert cache is nvrx.CheckpointMetadataCache


@pytest.mark.parametrize("name", RESULTS_QUEUES)
def test_the_results_queue_is_replaced_under_its_old_and_new_name(
    packages: Packages, name: str
) -> None:
    packages.write_both(name)
    install()
    replaced = getattr(strategy("filesystem_async"), name)
    assert replaced is megatron.get_write_results_queue
    replaced = getattr(imported(f"{ASYNC_CKPT}.filesystem_async"), name)
    assert replaced is nvrx.get_write_results_queue


def test_every_replaced_name_has_a_line_which_is_logged(
    packages: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="torch_ckpt"):
        lines = install()
    assert [record.getMessage() for record in caplog.records] == [f"replaced {x}" for x in lines]
    assert lines == [
        f"{STRATEGIES}.async_utils.AsyncCallsQueue -> torch_ckpt.megatron.AsyncCallsQueue",
        f"{STRATEGIES}.async_utils.AsyncRequest -> torch_ckpt.megatron.AsyncRequest",
        f"{STRATEGIES}.cached_metadata_filesystem_reader.CachedMetadataFileSystemReader"
        " -> torch_ckpt.megatron.CachedMetadataFileSystemReader",
        f"{STRATEGIES}.filesystem_async.FileSystemWriterAsync"
        " -> torch_ckpt.megatron.FileSystemWriterAsync",
        f"{STRATEGIES}.filesystem_async.get_write_results_queue"
        " -> torch_ckpt.megatron.get_write_results_queue",
        f"{STRATEGIES}.state_dict_saver.save_state_dict_async_finalize"
        " -> torch_ckpt.megatron.save_state_dict_async_finalize",
        f"{STRATEGIES}.state_dict_saver.save_state_dict_async_plan"
        " -> torch_ckpt.megatron.save_state_dict_async_plan",
        f"{ASYNC_CKPT}.cached_metadata_filesystem_reader.CachedMetadataFileSystemReader"
        " -> torch_ckpt.nvrx.CachedMetadataFileSystemReader",
        f"{ASYNC_CKPT}.core.AsyncCallsQueue -> torch_ckpt.nvrx.AsyncCallsQueue",
        f"{ASYNC_CKPT}.core.AsyncRequest -> torch_ckpt.nvrx.AsyncRequest",
        f"{ASYNC_CKPT}.core.abort_nvrx_checkpoint -> torch_ckpt.nvrx.abort_nvrx_checkpoint",
        f"{ASYNC_CKPT}.filesystem_async.FileSystemWriterAsync"
        " -> torch_ckpt.nvrx.FileSystemWriterAsync",
        f"{ASYNC_CKPT}.filesystem_async.get_write_results_queue"
        " -> torch_ckpt.nvrx.get_write_results_queue",
        f"{ASYNC_CKPT}.state_dict_saver.CheckpointMetadataCache"
        " -> torch_ckpt.nvrx.CheckpointMetadataCache",
        f"{ASYNC_CKPT}.state_dict_saver.get_metadata_caching_status"
        " -> torch_ckpt.nvrx.get_metadata_caching_status",
        f"{ASYNC_CKPT}.state_dict_saver.init_checkpoint_metadata_cache"
        " -> torch_ckpt.nvrx.init_checkpoint_metadata_cache",
        f"{ASYNC_CKPT}.state_dict_saver.save_state_dict_async_finalize"
        " -> torch_ckpt.nvrx.save_state_dict_async_finalize",
        f"{ASYNC_CKPT}.state_dict_saver.save_state_dict_async_plan"
        " -> torch_ckpt.nvrx.save_state_dict_async_plan",
        f"{ASYNC_CKPT}.torch_ckpt.AsyncCallsQueue -> torch_ckpt.nvrx.AsyncCallsQueue",
        f"{ASYNC_CKPT}.torch_ckpt.AsyncRequest -> torch_ckpt.nvrx.AsyncRequest",
        f"{ASYNC_CKPT}.torch_ckpt.TorchAsyncCheckpoint -> torch_ckpt.nvrx.TorchAsyncCheckpoint",
    ]


def test_names_imported_before_are_replaced(packages: Packages) -> None:
    packages.write(
        "megatron.training",
        {"saving": f"from {ASYNC_CKPT}.core import AsyncRequest as Request"},
    )
    saving = imported("megatron.training.saving")
    of_strategies = strategy("torch")
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
    strategy("torch")
    strategy("base")
    for module in ("core", "torch_ckpt", "filesystem_async", "state_dict_saver"):
        imported(f"{ASYNC_CKPT}.{module}")
    for module in MEGATRON_CORE:
        strategy(module)
    imported(f"{ASYNC_CKPT}.cached_metadata_filesystem_reader")
    before = all_names()
    lines = install()
    assert uninstall() == lines
    assert all_names() == before
    assert uninstall() == []


def test_uninstall_restores_names_imported_after_install(packages: Packages) -> None:
    theirs = imported(f"{STRATEGIES}.filesystem_async").FileSystemWriterAsync
    install()
    of_strategies = strategy("torch")
    assert of_strategies.FileSystemWriterAsync is megatron.FileSystemWriterAsync
    lines = uninstall()
    assert of_strategies.FileSystemWriterAsync is theirs
    assert (
        f"{STRATEGIES}.torch.FileSystemWriterAsync -> torch_ckpt.megatron.FileSystemWriterAsync"
        in lines
    )


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


def test_a_request_of_ours_is_a_request_of_theirs_in_their_worker(packages: Packages) -> None:
    """Nothing is installed in the worker, and it drops other requests silently."""
    of_megatron = strategy("async_utils").AsyncRequest
    of_nvrx = imported(f"{ASYNC_CKPT}.core").AsyncRequest
    sent = pickle.dumps(megatron.AsyncRequest(print, ("a",), [], call_idx=3))
    received = pickle.loads(sent)
    assert isinstance(received, of_megatron)
    assert isinstance(received, of_nvrx)
    assert received == megatron.AsyncRequest(print, ("a",), [], call_idx=3)


def test_a_request_of_ours_is_ours_if_theirs_are_not_imported(no_packages: Packages) -> None:
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


def test_a_package_that_fails_to_import_is_named_with_the_reason(
    packages: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    packages.write(STRATEGIES, {"__init__": "assert False, 'Minimum required nvrx is 0.6.0'"})
    with caplog.at_level(logging.INFO, logger="torch_ckpt"):
        lines = install()
    assert lines
    assert all(line.startswith(ASYNC_CKPT) for line in lines)
    assert (
        "not replaced: Megatron-core cannot be imported: "
        "AssertionError: Minimum required nvrx is 0.6.0" in caplog.text
    )


def test_a_package_with_a_missing_dependency_is_not_reported_as_not_installed(
    packages: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    packages.write(ASYNC_CKPT, {"filesystem_async": "import there_is_no_such_module"})
    with caplog.at_level(logging.INFO, logger="torch_ckpt"):
        install()
    assert (
        "nvidia-resiliency-ext cannot be imported: "
        "ModuleNotFoundError: No module named 'there_is_no_such_module'" in caplog.text
    )


def test_a_version_without_a_module_gets_the_other_replacements(packages: Packages) -> None:
    (packages.directory / ASYNC_CKPT.replace(".", "/") / "torch_ckpt.py").unlink()
    lines = install()
    assert f"{ASYNC_CKPT}.core.AsyncRequest -> torch_ckpt.nvrx.AsyncRequest" in lines
    assert "TorchAsyncCheckpoint" not in "".join(lines)


def test_options_of_the_writer_override_megatrons_arguments(
    packages: Packages, tmp_path: Path
) -> None:
    install(writer={"thread_count": 3})
    for module in (f"{STRATEGIES}.filesystem_async", f"{ASYNC_CKPT}.filesystem_async"):
        writer = imported(module).FileSystemWriterAsync(tmp_path, thread_count=1)
        assert writer.thread_count == 3


def test_options_of_the_reader_reach_it(packages: Packages, tmp_path: Path) -> None:
    install(reader={"allow_pickle": True})
    module = f"{STRATEGIES}.cached_metadata_filesystem_reader"
    assert imported(module).CachedMetadataFileSystemReader(tmp_path).allow_pickle


def test_a_class_with_options_has_the_signature_of_the_class_without(packages: Packages) -> None:
    """Megatron reads the options from the signature."""
    install(writer={"thread_count": 3})
    replaced = imported(f"{ASYNC_CKPT}.filesystem_async").FileSystemWriterAsync
    assert inspect.signature(replaced) == inspect.signature(nvrx.FileSystemWriterAsync)


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
