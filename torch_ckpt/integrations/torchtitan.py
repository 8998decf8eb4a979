"""Saves checkpoints for torchtitan's Trainer: the checkpointer ``TorchCkptManager``.

A step has the names of torchtitan's own checkpoints: the model's without a prefix, and those
beneath ``optimizer``, ``lr_scheduler``, ``dataloader`` and ``train_state``. So torchtitan's
checkpointer can load a step, and this one continues the run of a folder with ``step-100``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from torch_ckpt import api
from torch_ckpt.manager import CheckpointManager, LocalTier, SaveOptions
from torch_ckpt.multihost import broadcast_one_to_all

try:
    from torchtitan.components.checkpointer import MODEL, BaseCheckpointManager, ModelWrapper
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "torch_ckpt.integrations.torchtitan needs torchtitan 0.3. Run pip install torchtitan"
    ) from error
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem

__all__ = ["TorchCkptManager"]

# Name of a step of torchtitan's own checkpointer.
_STOCK_NAME = re.compile(r"step-(\d+)")

# The settings of torchtitan 0.3, and those of this checkpointer.
_SETTINGS = (
    *("enable", "folder", "interval", "keep_latest_k", "load_only", "load_step", "async_mode"),
    *("initial_load_path", "initial_load_model_only", "initial_load_in_hf", "export_dtype"),
    *("initial_load_in_hf_quantized", "last_save_model_only", "last_save_in_hf", "local"),
    *("exclude_from_loading", "create_seed_checkpoint", "enable_first_step_checkpoint"),
)


class TorchCkptManager(BaseCheckpointManager):  # type: ignore[no-untyped-call]
    """Checkpoints of torchtitan's Trainer, with the settings of torchtitan's own checkpointer.

    A :class:`torch_ckpt.CheckpointManager` saves the steps, such as ``folder/0000000100``. A model
    in Hugging Face's format has torchtitan's name, such as ``folder/step-100``.

    Args:
        config: its ``folder`` and ``initial_load_path`` can be URLs (docs/remote.md).
        dataloader, model_parts, optimizers, lr_schedulers, states, sd_adapter, base_folder: see
            ``torchtitan.components.checkpointer.CheckpointManager``.

    Raises:
        ValueError: a setting is unknown, a format needs an ``sd_adapter``, or a key to exclude does
            not exist.
        OSError, CheckpointError, RootInUse: see :class:`torch_ckpt.CheckpointManager`.

    Example::

        config = llama3_8b()  # from torchtitan's config registry
        config.checkpoint = TorchCkptManager.Config(enable=True, interval=100, local="/nvme/ckpt")
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """Settings of the checkpointer.

        Attributes:
            async_mode: "disabled" blocks until the step is complete; "async" blocks until the state
                has been copied; "async_with_pinned_mem" copies the state during the next step.
            local: a directory on each host's own disk, to which saves go first; see
                :class:`torch_ckpt.manager.LocalTier`.
        """

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        local: str | None = None

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable, self.save_future = config.enable, None
        if not self.enable:
            return
        self.config, self.states, self.sd_adapter = config, states, sd_adapter
        states |= {MODEL: ModelWrapper(model_parts), "optimizer": optimizers}
        states |= {"dataloader": dataloader, "lr_scheduler": lr_schedulers}
        _require_known(config)
        if sd_adapter is None and (config.last_save_in_hf or config.initial_load_in_hf):
            raise ValueError("Hugging Face's format needs a model with an sd_adapter")
        if unknown := set(config.exclude_from_loading) - states.keys():
            raise ValueError(f"exclude_from_loading: the state has no {', '.join(sorted(unknown))}")
        self.folder = filesystem.join(base_folder, config.folder)
        is_overlapped = config.async_mode == "async_with_pinned_mem"
        self.manager = CheckpointManager(
            self.folder,
            keep=config.keep_latest_k or None,
            preemption=None,  # torchtitan's loop cannot stop after a notice
            saves=SaveOptions(
                async_saves=config.async_mode != "disabled",
                staging="overlapped" if is_overlapped else "blocking",
            ),
            local=None if config.local is None else LocalTier(config.local),
            read_only=config.load_only,
        )

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self.config
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (last_step or is_first or curr_step % config.interval == 0):
            return False
        state = self._exported() if last_step and config.last_save_model_only else self._read()
        if last_step and config.last_save_in_hf:
            path = filesystem.join(self.folder, f"step-{curr_step}")
            api.save(self.sd_adapter.to_hf(state), path, format="safetensors")
            return True
        self.manager.save(curr_step, state, force=True)
        pending = self.manager._saver.pending
        self.save_future = None if pending is None else pending.handle.committed
        if last_step:
            self.maybe_wait_for_saving()
        return True

    def _exported(self) -> dict[str, Any]:
        """Returns the model's state, in the dtype of the export."""
        state: dict[str, Any] = dict(self.states[MODEL].state_dict())
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                state[name] = value.to(TORCH_DTYPE_MAP[self.config.export_dtype])
        return state

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self.manager.wait_until_finished()

    def _maybe_wait_for_staging(self) -> None:
        self.manager.wait_until_staged()

    def _close(self) -> None:
        self.manager.close()

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        stock = broadcast_one_to_all(self._stock_steps())
        wanted = max(stock, default=-1) if step == -1 else step
        try:
            restored = self._restore(None if step == -1 else step)
        except FileNotFoundError:
            if step not in stock:
                raise
            restored = -1
        if restored != -1 and restored >= wanted:
            return True
        config, adapter = self.config, self.sd_adapter
        path, model_only = config.initial_load_path, config.initial_load_model_only
        if wanted != -1:
            path, model_only = filesystem.join(self.folder, f"step-{wanted}"), wanted == 0
        elif config.initial_load_in_hf:
            model = self.states[MODEL]
            state = adapter.to_hf(model.state_dict())
            path = path or adapter.hf_assets_path
            if config.initial_load_in_hf_quantized:
                dcp_load(state, storage_reader=adapter.get_hf_storage_reader(path, True))
            else:
                api.load(state, path)
            model.load_state_dict(adapter.from_hf(state))
            return True
        if path is None:
            return False
        self._load_into(lambda state: api.load(state, path), model_only)
        return True

    def _restore(self, step: int | None) -> int:
        """Restores a step of the manager; None: the newest. Returns -1 if there is none."""
        newest = broadcast_one_to_all(self.manager.latest_step()) if step is None else step
        is_seed = newest == 0  # which has only a model
        wanted = 0 if is_seed else step
        restored = self._load_into(lambda state: self.manager.restore(state, wanted), is_seed)
        return restored if restored or is_seed else -1

    def _stock_steps(self) -> list[int]:
        """Returns the steps of torchtitan's own checkpointer in the folder."""
        names = filesystem.listdir(self.folder) if filesystem.isdir(self.folder) else []
        found = [int(match[1]) for name in names if (match := _STOCK_NAME.fullmatch(name))]
        path = f"{self.folder}/step-{{}}/.metadata"
        return [step for step in found if filesystem.isfile(path.format(step))]

    def _read(self) -> dict[str, Any]:
        """Returns the state to save, with the states of objects as dicts."""
        state: dict[str, Any] = dict(self.states[MODEL].state_dict())
        for key, value in self.states.items():
            if key != MODEL:
                state[key] = value.state_dict() if hasattr(value, "state_dict") else value
        return state

    def _load_into(self, load: Callable[[dict[str, Any]], Any], model_only: bool) -> Any:
        """Calls a function that loads into the state, and returns its result.

        The function gets objects. Only a load reads their states: to read the state of an optimizer
        that has none, torchtitan makes a step with zero gradients.
        """
        model = self.states[MODEL]
        state = dict(model.state_dict())
        names = set(state)
        for key in self.states.keys() - {MODEL, *self.config.exclude_from_loading}:
            if not model_only:
                value = self.states[key]
                state[key] = _Stateful(value) if hasattr(value, "load_state_dict") else value
        result = load(state)
        model.load_state_dict({name: state[name] for name in names})
        for key in state.keys() - names:
            if not isinstance(state[key], _Stateful):
                self.states[key] = state[key]
        return result


class _Stateful:
    """An object with a state. torch_ckpt would load that of a StatefulDataLoader as a value of each
    rank."""

    def __init__(self, of: Any) -> None:
        self.state_dict, self.load_state_dict = of.state_dict, of.load_state_dict


def _require_known(config: Any) -> None:
    """Raises ValueError for a setting of a later torchtitan, unless it has its default."""
    for one in fields(config):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if one.name not in _SETTINGS and getattr(config, one.name) != default:
            raise ValueError(f"TorchCkptManager does not support torchtitan's setting {one.name}")
