"""Checkpoints of Lightning's Trainer: ``Trainer(plugins=[TorchCkptIO()])``.

For ``lightning`` and ``pytorch_lightning`` alike. Lightning's strategies that save from rank 0
(one device, DDP) go through it. ``FSDPStrategy`` and ``ModelParallelStrategy`` save by DCP from all
ranks: :func:`install` makes them use the engine.

A checkpoint of the plugin is a directory of tensors under their names
(``state_dict.layer.weight``), readable by ``torch_ckpt.load`` and by stock DCP, and one object
``lightning``: all the rest of what Lightning hands over, with the tensors taken out.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import torch_ckpt
from torch_ckpt import _core

__all__ = ["TorchCkptIO", "install"]

_Path = str | os.PathLike[str]


# Both packages, which have strategies for the Trainer and for Fabric. Each module imports by name
# the functions that save and load.
_STRATEGIES = tuple(
    f"{package}.strategies.{module}"
    for package in (
        "lightning.pytorch",
        "lightning.fabric",
        "pytorch_lightning",
        "lightning_fabric",
    )
    for module in ("fsdp", "model_parallel")
)
_SAVE, _LOAD = "_distributed_checkpoint_save", "_distributed_checkpoint_load"


def install(
    *, writer: Mapping[str, Any] | None = None, reader: Mapping[str, Any] | None = None
) -> list[str]:
    """Makes ``FSDPStrategy`` and ``ModelParallelStrategy`` save and load by this engine.

    Call it on every rank before training. It concerns sharded checkpoints:
    ``ModelParallelStrategy(save_distributed_checkpoint=True)``, ``FSDPStrategy(
    state_dict_type="sharded")``. They stay directories that stock torch and Lightning load, and a
    save returns when it is durable. ``FSDPStrategy`` still reads the optimizer by stock torch.
    Calling it again replaces the options.

    Args:
        writer: options of :class:`torch_ckpt.FileSystemWriter` for every save.
        reader: options of :class:`torch_ckpt.FileSystemReader` for every load.

    Returns:
        The names of the functions that are replaced.

    Raises:
        ImportError: this version of Lightning has none of them.
    """
    options_of_save, options_of_load = dict(writer or {}), dict(reader or {})

    def save(converted_state: dict[str, Any], path: _Path) -> None:
        torch_ckpt.save(converted_state, path, **options_of_save)

    def load(module_state: dict[str, Any], path: _Path) -> None:
        torch_ckpt.load(module_state, path, **options_of_load)

    replaced = []
    for name in _STRATEGIES:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            continue
        module = importlib.import_module(name)
        for function, ours in ((_SAVE, save), (_LOAD, load)):
            if hasattr(module, function):
                setattr(module, function, ours)
                replaced.append(f"{name}.{function}")
    if not replaced:
        raise ImportError(
            f"none of {', '.join(_STRATEGIES)} has {_SAVE} or {_LOAD}: this version of Lightning "
            "saves sharded checkpoints in another way"
        )
    return replaced


def _bases() -> tuple[type, ...]:
    """Each name of Lightning has a class of its own that its Trainer looks for."""
    found: list[type] = []
    if importlib.util.find_spec("lightning") is not None:
        from lightning.fabric.plugins import CheckpointIO

        found.append(CheckpointIO)
    if importlib.util.find_spec("lightning_fabric") is not None:
        from lightning_fabric.plugins import CheckpointIO as FabricCheckpointIO

        found.append(FabricCheckpointIO)
    if not found:
        raise ModuleNotFoundError(
            "torch_ckpt.integrations.lightning needs Lightning: "
            "pip install 'torch_ckpt[lightning]' (or pytorch-lightning)"
        )
    return tuple(found)


# The name of all else that Lightning hands over.
_REST = "lightning"


class TorchCkptIO(*_bases()):  # type: ignore[misc]
    """A ``CheckpointIO`` plugin that saves beside training.

    A save returns when the state has been copied. The next save, a load and the end of the run wait
    for it and raise its error. What ModelCheckpoint removes goes only after the save under way is
    durable; where that one fails, it stays.

    ``ModelCheckpoint(save_last="link")`` needs ``async_saves=False``: it moves the link when a save
    returns, and a crash before that save is durable would leave it without a checkpoint.

    Not thread-safe, as all of Lightning's plugins. Works on local directories.

    Args:
        async_saves: False returns from a save when it is durable.
        writer_options: passed to :class:`FileSystemWriter`.
    """

    def __init__(self, *, async_saves: bool = True, **writer_options: Any) -> None:
        super().__init__()
        self._async = async_saves
        self._options = writer_options
        self._save: torch_ckpt.AsyncSave | None = None
        self._removals: list[Future[None]] = []
        self._worker: ThreadPoolExecutor | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _Path, storage_options: Any = None
    ) -> None:
        """Saves what Lightning hands over into the directory ``path``.

        Raises:
            CheckpointException: this save, or the one before, failed; with the cause.
            OSError: an old checkpoint could not be removed.
            TypeError: ``storage_options`` are given: set options where the plugin is made.
            ValueError: ``path`` is a URL; two values have one name; a ModelCheckpoint links to its
                last checkpoint, and saves are asynchronous.
        """
        if storage_options is not None:
            raise TypeError(
                "storage_options are not supported: give TorchCkptIO the options of a writer"
            )
        path = _local(path)
        if self._async:
            _refuse_links(checkpoint)
        self.wait_until_finished()
        tensors: dict[str, Any] = {_REST: None}
        # A tuple is one object to DCP; in a dict it would see keys to flatten.
        rest = (_split(checkpoint, (), tensors),)
        state = {name: of for name, of in tensors.items() if of is not None} | {_REST: rest}
        if self._async:
            # Lightning saves one state several times, as the best and as the last.
            self._save = torch_ckpt.async_save(
                state, path, no_dist=True, warn_unchanged=False, **self._options
            )
        else:
            torch_ckpt.save(state, path, no_dist=True, **self._options)

    def load_checkpoint(
        self,
        path: _Path,
        map_location: str | torch.device | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """What was handed to :meth:`save_checkpoint`, with tensors on ``map_location`` (the CPU).

        Args:
            path: the checkpoint's directory.
            map_location: a device.
            weights_only: False loads objects of any class, and with them runs code of whoever wrote
                the checkpoint.

        Raises:
            FileNotFoundError: there is no checkpoint, or ``path`` links to none.
            CheckpointException: with the cause: ``Corrupt``, ``Unsafe``, ``OSError``.
            TypeError: ``map_location`` is not a device.
        """
        path = _local(path)
        if not isinstance(map_location, str | torch.device | None):
            raise TypeError(f"map_location must be a device or None, got {map_location!r}")
        self.wait_until_finished()
        if os.path.islink(path) and not os.path.exists(os.path.join(path, ".metadata")):
            raise FileNotFoundError(
                errno.ENOENT,
                f"it links to {os.readlink(path)}, of which the save has not ended: remove the "
                "link, and give the path of an older checkpoint",
                path,
            )
        metadata = torch_ckpt.FileSystemReader(path).read_metadata().state_dict_metadata
        if _REST not in metadata:
            raise ValueError(f"{path} was not saved by TorchCkptIO: it has no {_REST!r}")
        state: dict[str, Any] = {
            name: torch.empty(of.size, dtype=of.properties.dtype, device=map_location)
            if isinstance(of, TensorStorageMetadata)
            else None
            for name, of in metadata.items()
        }
        torch_ckpt.load(state, path, no_dist=True, allow_pickle=weights_only is False)
        checkpoint: dict[str, Any] = _join(state.pop(_REST)[0], (), state)
        return checkpoint

    def remove_checkpoint(self, path: _Path) -> None:
        """Removes a checkpoint: after the save under way, and only if that one succeeds."""
        path = _local(path)
        if self._save is None:
            _remove(path)
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "torch_ckpt removals")
        self._removals.append(self._worker.submit(_remove_after, self._save, path))

    def wait_until_finished(self) -> None:
        """Waits until the save under way is durable, and old checkpoints are removed.

        Raises:
            CheckpointException: the save failed; with the cause.
            OSError: a checkpoint could not be removed.
        """
        save, self._save = self._save, None
        removals, self._removals = self._removals, []
        if save is not None:
            save.result()
        for removal in removals:
            removal.result()

    def teardown(self) -> None:
        """Called by the Trainer at its end, also after an error: waits, and raises what failed."""
        try:
            self.wait_until_finished()
        finally:
            if self._worker is not None:
                self._worker.shutdown()
                self._worker = None


def _local(path: _Path) -> str:
    path = os.fspath(path)
    if "://" in path:
        raise ValueError(f"TorchCkptIO writes to local directories, not to {path}")
    return path


def _refuse_links(checkpoint: dict[str, Any]) -> None:
    # Lightning shows no more of its callbacks than what they save: ModelCheckpoint where it has put
    # its last checkpoint, from the second save on.
    for state in checkpoint.get("callbacks", {}).values():
        last = state.get("last_model_path") if isinstance(state, dict) else None
        if last and os.path.islink(last):
            raise ValueError(
                f'{last} is a link: ModelCheckpoint(save_last="link") moves it before a save in '
                "the background is durable. Use TorchCkptIO(async_saves=False); or save_last=True, "
                "with the link removed"
            )


def _remove_after(save: torch_ckpt.AsyncSave, path: str) -> None:
    _core.fault_point("wait for the save before a removal", path)
    try:
        save.result()
    except BaseException:  # whoever asks for the save's result next gets it
        return
    _remove(path)


def _remove(path: str) -> None:
    if os.path.islink(path) or os.path.isfile(path):
        os.remove(path)
    elif os.path.isdir(path):
        # Without it the directory is not a checkpoint, whatever happens on the way.
        metadata = os.path.join(path, ".metadata")
        if os.path.exists(metadata):
            os.remove(metadata)
        _core.fault_point("rmtree", path)
        shutil.rmtree(path)


# --- tensors and the rest ------------------------------------------------------------------------


def _split(value: Any, path: tuple[Any, ...], tensors: dict[str, Any]) -> Any:
    """The value without its tensors, which go to ``tensors`` by their path."""
    # None counts as well: it is what stands in a tensor's place.
    if value is None or isinstance(value, Tensor):
        name = _name(path)
        if name in tensors:
            raise ValueError(f"two values of the checkpoint have the name {name}")
        tensors[name] = value
        return None
    return _rebuilt(value, path, lambda of, at: _split(of, at, tensors))


def _join(value: Any, path: tuple[Any, ...], tensors: dict[str, Any]) -> Any:
    if value is None:
        return tensors.get(_name(path))
    return _rebuilt(value, path, lambda of, at: _join(of, at, tensors))


def _rebuilt(value: Any, path: tuple[Any, ...], each: Callable[[Any, Any], Any]) -> Any:
    """A container with something else in it; any other value is itself."""
    if type(value) in (dict, OrderedDict):
        rebuilt = type(value)((key, each(of, (*path, key))) for key, of in value.items())
        # Versions of modules are an attribute of their state dict.
        if type(value) is OrderedDict:
            vars(rebuilt).update(vars(value))
        return rebuilt
    if type(value) in (list, tuple):
        return type(value)(each(of, (*path, at)) for at, of in enumerate(value))
    return value


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
