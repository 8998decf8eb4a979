"""Saves checkpoints for torchtitan's Trainer: the checkpointer ``TorchCkptManager``.

The values of a step have the same names as in torchtitan's own checkpoints. So torchtitan's
checkpointer can load a step, and this checkpointer can continue a run of torchtitan's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from torch_ckpt import api
from torch_ckpt._base.checks import require_choice
from torch_ckpt._base.log import LOGGER, warn
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.opened import Checkpoint
from torch_ckpt.errors import CheckpointError
from torch_ckpt.manager import CheckpointManager, LocalTier, SaveOptions
from torch_ckpt.stores import open_store

try:
    from torchtitan.components.checkpointer import (  # type: ignore[import-untyped]
        MODEL,
        BaseCheckpointManager,
        ModelWrapper,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "torch_ckpt.integrations.torchtitan needs torchtitan 0.3. Run pip install torchtitan"
    ) from error
from torchtitan.config import TORCH_DTYPE_MAP  # type: ignore[import-untyped]
from torchtitan.tools import filesystem  # type: ignore[import-untyped]

__all__ = ["TorchCkptManager"]

# Name of a step of torchtitan's own checkpointer.
_STOCK_NAME = re.compile(r"step-(\d+)")

_Mode = Literal["disabled", "async", "async_with_pinned_mem"]

# Known settings: torchtitan 0.3's and this checkpointer's.
_SETTINGS = (
    *("enable", "folder", "interval", "keep_latest_k", "load_only", "load_step", "async_mode"),
    *("initial_load_path", "initial_load_model_only", "initial_load_in_hf", "export_dtype"),
    *("initial_load_in_hf_quantized", "last_save_model_only", "last_save_in_hf", "local"),
    *("exclude_from_loading", "create_seed_checkpoint", "enable_first_step_checkpoint"),
)


class TorchCkptManager(BaseCheckpointManager):  # type: ignore[misc]
    """Checkpoints of torchtitan's Trainer, with the settings of torchtitan's own checkpointer.

    A :class:`torch_ckpt.CheckpointManager` saves the steps, such as ``folder/0000000100``. A model
    in Hugging Face's format has torchtitan's name, such as ``folder/step-100``.

    Args:
        config: its ``folder`` and ``initial_load_path`` can be URLs (docs/remote.md).
        dataloader, model_parts, optimizers, lr_schedulers, states, sd_adapter, base_folder: see
            ``torchtitan.components.checkpointer.CheckpointManager``.

    Raises:
        ValueError: a setting is unknown, Hugging Face's format needs an ``sd_adapter``, or
            ``exclude_from_loading`` has a key that does not exist.
        OSError, CheckpointError, RootInUse: see :class:`torch_ckpt.CheckpointManager`.

    Example::

        config = llama3_8b()  # from torchtitan's config registry
        config.checkpoint = TorchCkptManager.Config(enable=True, interval=100, local="/nvme/ckpt")
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """Settings of the checkpointer.

        Attributes:
            async_mode: "disabled" blocks until the step is complete; "async" blocks until the state
                has been copied; "async_with_pinned_mem" copies the state during the next step.
            local: a directory on each host's own disk, to which saves go first; see
                :class:`torch_ckpt.manager.LocalTier`.
        """

        async_mode: _Mode = "async"
        local: str | None = None

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            require_choice("async_mode", self.async_mode, get_args(_Mode))

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
        self.enable = config.enable
        self.save_future: Future[Checkpoint] | None = None
        if not self.enable:
            return
        self.config, self.states, self.sd_adapter = config, states, sd_adapter
        states |= {MODEL: ModelWrapper(model_parts), "optimizer": optimizers}
        states |= {"dataloader": dataloader, "lr_scheduler": lr_schedulers}
        _require_known(config)
        if sd_adapter is None and (config.last_save_in_hf or config.initial_load_in_hf):
            raise ValueError("Hugging Face's format needs a model with an sd_adapter")
        if config.last_save_in_hf and config.create_seed_checkpoint:
            raise ValueError(
                "create_seed_checkpoint cannot be combined with last_save_in_hf: no run can start "
                "from Hugging Face's format in its own folder. Pass last_save_in_hf=False"
            )
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
        if last_step:
            self.save_future = None
            self.manager.wait_until_finished(published=True)
            return True
        pending = self.manager._saver.pending
        self.save_future = None if pending is None else pending.handle.committed
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
        # Do not raise the save's error here: ranks detect the error at different steps. The next
        # save raises it on all ranks.
        pending = self.manager._saver.pending
        if pending is not None and pending.can_wait:
            pending.handle.wait_staged_quietly()

    def _close(self) -> None:
        self.manager.close()

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        ask = self.manager._run.ask_rank_0
        stock, exports = ask("TorchCkptManager.load", lambda: _stock_steps(self.folder))
        wanted = max(stock, default=-1) if step == -1 else step
        if step != -1 and stock and stock[-1] > step and self.manager._run.rank == 0:
            warn(
                f"step {step} is loaded, but {self.folder} has later steps of torchtitan's "
                f"checkpointer, up to step-{stock[-1]}. A restart without load_step continues from "
                "the newest of them: move them to another directory"
            )
        if self._restore(step, wanted, is_in_stock=wanted in stock):
            return True
        config, adapter = self.config, self.sd_adapter
        path, model_only = config.initial_load_path, config.initial_load_model_only
        if wanted != -1:
            path, model_only = filesystem.join(self.folder, f"step-{wanted}"), wanted == 0
        elif exports:
            raise CheckpointError(
                f"{self.folder} has a model in Hugging Face's format ({exports[0]}), but no step "
                "from which a run can continue. Choose another folder"
            )
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
        state = self._read(model_only, config.exclude_from_loading)
        api.load(state, path)
        self._apply(state)
        if wanted != -1:
            self.manager._timeline.restored(wanted, is_chosen=step != -1)
        LOGGER.info("loaded %s", path)
        return True

    def _restore(self, step: int, wanted: int, is_in_stock: bool) -> bool:
        """Restores a step of the manager; -1 means the newest step.

        Args:
            wanted: the newest step of torchtitan's checkpointer, or ``step``. Older steps are not
                restored.
            is_in_stock: torchtitan's checkpointer has saved the step.

        Returns:
            False if the manager has no such step.
        """
        state: dict[str, Any] = {}

        # Read the state only if there is a step: torchtitan reads the state of a new optimizer by
        # running an optimizer step with zero gradients. A run that starts from scratch must not run
        # this step.
        def state_of(chosen: int) -> dict[str, Any]:
            if chosen < wanted:
                raise _OlderStepError
            # Step 0 is a seed, which has only a model.
            if chosen == 0 and state.keys() & self.states.keys():
                raise CheckpointError(
                    "the steps after the seed are damaged, and have changed the optimizer. To "
                    "start from the seed, restart with load_step=0"
                )
            state.clear()
            state.update(self._read(chosen == 0, self.config.exclude_from_loading))
            return state

        try:
            restored = self.manager._restore({}, None if step == -1 else step, state_of=state_of)
        except _OlderStepError:
            return False
        except FileNotFoundError as error:
            # A failed load is also an error of its cause's type.
            if not is_in_stock or isinstance(error, CheckpointException):
                raise
            return False
        if restored is None:
            return False
        self._apply(state)
        return True

    def _read(self, model_only: bool = False, excluded: Collection[str] = ()) -> dict[str, Any]:
        """Returns the state, with the states of objects as dicts."""
        state: dict[str, Any] = dict(self.states[MODEL].state_dict())
        for key, value in self.states.items():
            if key != MODEL and key not in excluded and not model_only:
                state[key] = value.state_dict() if hasattr(value, "state_dict") else value
        return state

    def _apply(self, state: dict[str, Any]) -> None:
        self.states[MODEL].load_state_dict(state)
        for key in sorted(self.states.keys() & state.keys()):
            if hasattr(self.states[key], "load_state_dict"):
                self.states[key].load_state_dict(state[key])
            else:
                self.states[key] = state[key]


class _OlderStepError(Exception):
    """Raised if torchtitan's checkpointer has saved a newer step."""


def _stock_steps(folder: str) -> tuple[list[int], list[str]]:
    """Returns the steps of torchtitan's own checkpointer in a folder, and the names of directories
    with a model in Hugging Face's format."""
    names: list[str] = []
    if is_url(folder):
        names = [entry.name for entry in open_store(folder).list()]
    else:
        with suppress(FileNotFoundError):
            for name in filter(_STOCK_NAME.fullmatch, os.listdir(folder)):
                names += [f"{name}/{file}" for file in os.listdir(f"{folder}/{name}")]
    steps, exports = [], []
    for name in names:
        directory, _, file = name.partition("/")
        match = _STOCK_NAME.fullmatch(directory)
        if match and file == ".metadata":
            steps.append(int(match[1]))
        elif match and file.startswith("model"):
            exports.append(directory)
    return sorted(steps), sorted({*exports} - {f"step-{step}" for step in steps})


def _require_known(config: Any) -> None:
    """Raises ValueError for a setting of a later torchtitan, unless it has its default."""
    for one in fields(config):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if one.name not in _SETTINGS and getattr(config, one.name) != default:
            raise ValueError(f"TorchCkptManager does not support torchtitan's setting {one.name}")
