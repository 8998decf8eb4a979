"""Saves checkpoints for Lightning's Trainer: ``Trainer(plugins=[TorchCkptIO()])``.

Supports both packages, ``lightning`` and ``pytorch_lightning``. Strategies that save from rank 0 (a
single device, DDP) use the plugin. ``FSDPStrategy`` and ``ModelParallelStrategy`` save from all
ranks through DCP and ignore the plugin; :func:`install` makes them use torch_ckpt.

The plugin saves a checkpoint as a directory that ``torch_ckpt.load`` and stock DCP can read. It
contains each tensor under its name (``state_dict.layer.weight``), and everything else in
Lightning's checkpoint as one object named ``lightning``.
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
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_ckpt import _core, api
from torch_ckpt._base.system import local_path
from torch_ckpt.checkpoint.index import METADATA_NAME
from torch_ckpt.checkpoint.opened import Checkpoint
from torch_ckpt.options import (
    DEFAULT_OPTIONS,
    DEFAULT_READ_OPTIONS,
    ReadOptions,
    WriteOptions,
    refuse_options,
)
from torch_ckpt.saving.handle import AsyncSave
from torch_ckpt.state.splitting import map_children
from torch_ckpt.stores import open_object, open_store

if TYPE_CHECKING:
    from typing_extensions import Never  # in typing since Python 3.11

__all__ = ["TorchCkptIO", "install"]

_Path = str | os.PathLike[str]


# Both packages have strategies for the Trainer and for Fabric. Each strategy module imports the
# save and load functions by name, so replace the functions in each module.
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
    *, writer: WriteOptions = DEFAULT_OPTIONS, reader: ReadOptions = DEFAULT_READ_OPTIONS
) -> list[str]:
    """Makes ``FSDPStrategy`` and ``ModelParallelStrategy`` save and load through torch_ckpt.

    Call this function on every rank before training. Only sharded checkpoints are affected, that
    is, ``ModelParallelStrategy(save_distributed_checkpoint=True)`` and
    ``FSDPStrategy(state_dict_type="sharded")``. Stock torch and Lightning can still load these
    checkpoints. A save blocks until the checkpoint is durable. ``FSDPStrategy`` still loads the
    optimizer through stock torch. A second call replaces the options of the first call.

    Args:
        writer: the options of every save.
        reader: the options of every load.

    Returns:
        The names of the replaced functions.

    Raises:
        ImportError: this version of Lightning has none of the functions to replace.

    Example::

        install(writer=torch_ckpt.WriteOptions(thread_count=4))
        trainer = L.Trainer(strategy=ModelParallelStrategy(save_distributed_checkpoint=True))
    """

    def save(converted_state: dict[str, Any], path: _Path) -> None:
        api.save(converted_state, path, options=writer)

    def load(module_state: dict[str, Any], path: _Path) -> None:
        api.load(module_state, path, options=reader)

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
            "this version of Lightning is not supported: none of "
            f"{', '.join(_STRATEGIES)} has {_SAVE} or {_LOAD}"
        )
    return replaced


def _bases() -> tuple[type, ...]:
    """Returns each Lightning package's base class, because each Trainer requires its own."""
    found = tuple(
        importlib.import_module(f"{fabric}.plugins").CheckpointIO
        for fabric in ("lightning.fabric", "lightning_fabric")
        if importlib.util.find_spec(fabric.partition(".")[0]) is not None
    )
    if not found:
        raise ModuleNotFoundError(
            "torch_ckpt.integrations.lightning needs Lightning. Run "
            "pip install 'torch_ckpt[lightning]' (or pip install pytorch-lightning)"
        )
    return found


# Name of the object that contains everything except the tensors.
_REST = "lightning"


class TorchCkptIO(*_bases()):  # type: ignore[misc]
    """A ``CheckpointIO`` plugin that saves in the background.

    A save returns when the state has been copied. The next save, the next load and the end of the
    run wait for the save and raise its error. If ModelCheckpoint removes a checkpoint during a
    save, the checkpoint is deleted once the save is durable, and kept if the save fails.

    ``ModelCheckpoint(save_last="link")`` requires ``async_saves=False``, because it moves the link
    when a save returns. After a crash before the save is durable, the link would point to an
    incomplete checkpoint.

    Not thread-safe, like all Lightning plugins. All paths may be URLs; see docs/remote.md.

    Args:
        async_saves: save in the background. If False, a save blocks until it is durable.
        options: the options of the saves; their ``storage_options`` also hold for loads and
            removals.
        removed: no keyword; the error for a former one names what replaces it.

    Example::

        options = torch_ckpt.WriteOptions(thread_count=4)
        trainer = L.Trainer(plugins=[TorchCkptIO(options=options)])
    """

    def __init__(
        self,
        *,
        async_saves: bool = True,
        options: WriteOptions = DEFAULT_OPTIONS,
        **removed: Never,
    ) -> None:
        if removed:
            refuse_options(TorchCkptIO, removed, options=WriteOptions)
        super().__init__()
        self._async = async_saves
        self._options = options
        self._save: AsyncSave | None = None
        self._removals: list[Future[None]] = []
        self._worker: ThreadPoolExecutor | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _Path, storage_options: Any = None
    ) -> None:
        """Saves Lightning's checkpoint to the directory or URL ``path``.

        Raises:
            CheckpointException: this save or the previous one failed; contains the cause.
            OSError: an old checkpoint could not be removed.
            TypeError: ``storage_options`` is given. Pass options to the constructor instead.
            ValueError: two values have the same name, saves are asynchronous and a ModelCheckpoint
                uses ``save_last="link"``, or the URL is not allowed.
        """
        if storage_options is not None:
            raise TypeError(
                "storage_options is not supported. Pass TorchCkptIO(options=WriteOptions(...))"
            )
        path = _path_or_url(path)
        if self._async:
            _refuse_links(checkpoint)
        self.wait_until_finished()
        tensors: dict[str, Any] = {_REST: None}
        # Wrap the dict in a tuple: DCP stores a tuple as one object, but would flatten a dict.
        rest = (_split(checkpoint, (), tensors),)
        state = {name: part for name, part in tensors.items() if part is not None} | {_REST: rest}
        if self._async:
            # Unchanged values are normal: Lightning saves the same state as best and as last.
            self._save = api.async_save(
                state, path, no_dist=True, warn_unchanged=False, options=self._options
            )
        else:
            api.save(state, path, no_dist=True, options=self._options)

    def load_checkpoint(
        self,
        path: _Path,
        map_location: str | torch.device | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint that :meth:`save_checkpoint` saved.

        Args:
            path: the checkpoint directory, or its URL.
            map_location: the device for tensors; None means the CPU.
            weights_only: False loads objects of any class, which may run code from the checkpoint.

        Raises:
            FileNotFoundError: there is no checkpoint, or ``path`` is a link to an incomplete one.
            CheckpointException: the load failed; contains the cause, such as ``Corrupt``,
                ``Unsafe`` or ``OSError``.
            TypeError: ``map_location`` is not a device.
            ValueError: the checkpoint was not saved by this plugin, or the URL is not allowed.
        """
        path = _path_or_url(path)
        if not isinstance(map_location, str | torch.device | None):
            raise TypeError(f"map_location must be a device or None, got {map_location!r}")
        self.wait_until_finished()
        if os.path.islink(path) and not os.path.exists(os.path.join(path, ".metadata")):
            raise FileNotFoundError(
                errno.ENOENT,
                f"the link points to {os.readlink(path)}, whose save was interrupted. Remove the "
                "link, and pass the path of an older checkpoint",
                path,
            )
        options = ReadOptions(
            allow_pickle=weights_only is False, storage_options=self._options.storage_options
        )
        metadata = Checkpoint(path, options=options).metadata().state_dict_metadata
        if _REST not in metadata:
            raise ValueError(
                f"{path} was not saved by TorchCkptIO: it has no object named {_REST!r}"
            )
        state: dict[str, Any] = {
            name: torch.empty(item.size, dtype=item.properties.dtype, device=map_location)
            if isinstance(item, TensorStorageMetadata)
            else None
            for name, item in metadata.items()
        }
        api.load(state, path, no_dist=True, options=options)
        checkpoint: dict[str, Any] = _join(state.pop(_REST)[0], (), state)
        return checkpoint

    def remove_checkpoint(self, path: _Path) -> None:
        """Removes a checkpoint.

        If a save is in progress, the checkpoint is removed after the save, and only if the save
        succeeds.

        Raises:
            OSError: the checkpoint could not be removed. If a save is in progress,
                :meth:`wait_until_finished` raises this error instead.
        """
        remove = partial(_remove, _path_or_url(path), self._options.storage_options)
        if self._save is None:
            remove()
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "torch_ckpt removals")
        self._removals.append(self._worker.submit(_remove_after, self._save, path, remove))

    def wait_until_finished(self) -> None:
        """Waits until the save in progress is durable and old checkpoints are removed.

        Raises:
            CheckpointException: the save failed; contains the cause.
            OSError: a checkpoint could not be removed.
        """
        save, self._save = self._save, None
        removals, self._removals = self._removals, []
        if save is not None:
            save.result()
        for removal in removals:
            removal.result()

    def teardown(self) -> None:
        """Waits for the last save and raises its error. The Trainer calls this method.

        Raises:
            CheckpointException: the save failed; contains the cause.
            OSError: a checkpoint could not be removed.
        """
        try:
            self.wait_until_finished()
        finally:
            if self._worker is not None:
                self._worker.shutdown()
                self._worker = None


def _path_or_url(path: _Path) -> str:
    local = local_path(path)
    return os.fspath(path) if local is None else local


def _refuse_links(checkpoint: dict[str, Any]) -> None:
    # The plugin sees only the saved callback states. From the second save on, the state of
    # ModelCheckpoint contains the path of its last checkpoint.
    for state in checkpoint.get("callbacks", {}).values():
        last = state.get("last_model_path") if isinstance(state, dict) else None
        if last and os.path.islink(last):
            raise ValueError(
                f'{last} is a link: ModelCheckpoint(save_last="link") moves it before a background '
                "save is durable. Use TorchCkptIO(async_saves=False), or remove the link and use "
                "ModelCheckpoint(save_last=True)"
            )


def _remove_after(save: AsyncSave, path: _Path, remove: Callable[[], None]) -> None:
    _core.fault_point("wait for the save before a removal", os.fspath(path))
    try:
        save.result()
    except BaseException:  # wait_until_finished() raises the save's error
        return
    remove()


def _remove(path: str, storage_options: Mapping[str, Any] | None) -> None:
    if local_path(path) is None:
        _remove_objects(path, storage_options)
    elif os.path.islink(path) or os.path.isfile(path):
        os.remove(path)
    elif os.path.isdir(path):
        # Remove the metadata first, so that an interrupted removal leaves no partial checkpoint.
        metadata = os.path.join(path, METADATA_NAME)
        if os.path.exists(metadata):
            os.remove(metadata)
        _core.fault_point("rmtree", path)
        shutil.rmtree(path)


def _remove_objects(url: str, storage_options: Mapping[str, Any] | None) -> None:
    """Deletes the objects beneath a URL, and the object at the URL itself, which is a checkpoint of
    Lightning's own."""
    checkpoint = open_store(url, storage_options)
    names = [entry.name for entry in checkpoint.list()]
    # Delete the metadata first, as above.
    checkpoint.delete(name for name in names if name == METADATA_NAME)
    checkpoint.delete(name for name in names if name != METADATA_NAME)
    store, name = open_object(url, storage_options)
    if name and store.find(name) is not None:
        store.delete([name])


# --- tensors and other values --------------------------------------------------------------------


def _split(value: Any, path: tuple[Any, ...], tensors: dict[str, Any]) -> Any:
    """Returns the value with each tensor replaced by None; adds tensors to ``tensors`` by name."""
    # Also add a stored None, so that _join() can distinguish it from a removed tensor.
    if value is None or isinstance(value, Tensor):
        name = _name(path)
        if name in tensors:
            raise ValueError(
                f"two values in the checkpoint have the name {name}; rename one of them"
            )
        tensors[name] = value
        return None
    return _map_children(value, path, lambda child, at: _split(child, at, tensors))


def _join(value: Any, path: tuple[Any, ...], tensors: dict[str, Any]) -> Any:
    """Puts the tensors back; inverse of :func:`_split`."""
    if value is None:
        return tensors.get(_name(path))
    return _map_children(value, path, lambda child, at: _join(child, at, tensors))


def _map_children(value: Any, path: tuple[Any, ...], each: Callable[[Any, Any], Any]) -> Any:
    """Rebuilds a container from ``each(child, path)``; returns other values unchanged."""
    if type(value) not in (dict, OrderedDict, list, tuple):
        return value
    return map_children(value, lambda child, key: each(child, (*path, key)))


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
