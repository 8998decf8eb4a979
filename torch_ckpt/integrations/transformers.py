"""Saves checkpoints for transformers' Trainer with a :class:`torch_ckpt.CheckpointManager`::

    manager = torch_ckpt.CheckpointManager("checkpoints", keep=3)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    callback = CheckpointCallback(trainer, manager)
    trainer.train(resume_from_checkpoint=callback.resume())

Note [When Trainer saves and restores]
Callbacks are not enough to save and restore a run exactly. Trainer evaluates after ``on_step_end``,
and evaluation draws random numbers. Trainer also computes its position in the data from
``trainer_state.json`` before the first callback runs. Therefore, CheckpointCallback replaces
methods of its Trainer. It offers a step to the manager after Trainer has logged and evaluated, and
the last step of an epoch after the epoch's evaluation. It restores each part of the state when
Trainer would load that part.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_ckpt.manager.manager import CheckpointManager
from torch_ckpt.state.states import RNGState

try:
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "torch_ckpt.integrations.transformers needs transformers. Run "
        "pip install 'torch_ckpt[transformers]'"
    ) from error
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

__all__ = ["CheckpointCallback"]

# Trainer reads its state from this file in the directory from which it resumes.
_STATE_FILE = "trainer_state.json"


class CheckpointCallback(transformers.TrainerCallback):
    """Saves and restores the complete state of a Trainer's run.

    A checkpoint contains weights, optimizer, schedule, scaler, counters, logs, callback states, and
    each rank's random number generators.

    The callback adds itself to the Trainer, which then writes no checkpoints of its own. The
    manager's interval and retention rules determine which steps are saved and kept; the last step
    is always saved. After a preemption notice, the ranks save the step that they agree on, and
    training stops. If a step was evaluated, the evaluation results become its checkpoint's metrics.

    Args:
        trainer: a Trainer with ``save_strategy="no"`` whose ``train()`` has not been called.
        manager: the manager that saves. Training waits for its saves before it ends. The caller
            must close the manager.

    Raises:
        ValueError: the Trainer saves checkpoints itself, already has a CheckpointCallback, uses
            DeepSpeed, or comes from an unsupported version of transformers.

    Example::

        with torch_ckpt.CheckpointManager("checkpoints", interval=500) as manager:
            callback = CheckpointCallback(trainer, manager)
            trainer.train(resume_from_checkpoint=callback.resume())
    """

    def __init__(self, trainer: transformers.Trainer, manager: CheckpointManager) -> None:
        if trainer.is_deepspeed_enabled:
            raise ValueError(
                "CheckpointCallback does not support DeepSpeed. Use DeepSpeed's own checkpoints"
            )
        strategy = SaveStrategy(trainer.args.save_strategy)
        if strategy is not SaveStrategy.NO:
            raise ValueError(
                f'save_strategy is "{strategy.value}". Set it to "no": the manager\'s interval '
                "determines when to save"
            )
        if any(isinstance(c, CheckpointCallback) for c in trainer.callback_handler.callbacks):
            raise ValueError("this Trainer already has a CheckpointCallback")
        self.manager = manager
        self._trainer = trainer
        self._metrics: dict[str, float] = {}
        self._evaluated_at = self._ended_at = self._offered = -1
        self._resumed_from: int | None = None
        self._resume_dir: tempfile.TemporaryDirectory[str] | None = None
        self._rng: dict[str, Any] = {}
        # See Note [When Trainer saves and restores].
        self._finish_step = self._replace("_maybe_log_save_evaluate", self._after_step)
        self._replace("_save_checkpoint", lambda model, trial: self._save(force=True))
        self._replace("_load_from_checkpoint", lambda path, model=None: None)
        self._replace("_load_optimizer_and_scheduler", self._restore)
        self._replace("_load_scaler", lambda path: None)
        self._replace("_load_rng_state", self._restore_random_numbers)
        trainer.add_callback(self)

    def resume(self, step: int | None = None) -> str | None:
        """Returns the argument for ``trainer.train(resume_from_checkpoint=...)``.

        All ranks must call this method.

        Args:
            step: the step to resume from; None means the newest one.

        Returns:
            A directory with the state from which Trainer computes its position in the data, or None
            if there is no checkpoint. All other state is restored when Trainer loads it.

        Raises:
            CheckpointException: the restore failed; contains the cause from each failed rank.

        Example::

            trainer.train(resume_from_checkpoint=callback.resume())
        """
        progress = _Progress(self._trainer)
        restored = self.manager.restore({"progress": progress}, step)
        if not restored:
            return None
        self._resumed_from = restored
        self._resume_dir = tempfile.TemporaryDirectory(prefix="torch_ckpt-resume-")
        Path(self._resume_dir.name, _STATE_FILE).write_text(progress.text)
        return self._resume_dir.name

    def on_evaluate(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        metrics: dict[str, Any] | None = None,
        **_: object,
    ) -> None:
        """Stores the evaluation results as the metrics for the step's checkpoint."""
        if self._evaluated_at != state.global_step:
            self._metrics, self._evaluated_at = {}, state.global_step
        items = (metrics or {}).items()
        self._metrics |= {name: value for name, value in items if isinstance(value, int | float)}

    def on_train_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **_: object,
    ) -> None:
        """Saves the last step, waits for all saves, and raises their errors."""
        try:
            self.manager.wait_until_finished()
        finally:
            # Save the last step even if an earlier save failed. Wait first, so that all ranks agree
            # on which saves failed.
            if self.manager.last_step != state.global_step:
                self._save(force=True)
                self.manager.wait_until_finished()
        if self._resume_dir is not None:
            self._resume_dir.cleanup()

    # --- replacements for Trainer's methods ------------------------------------------------

    def _replace(self, name: str, method: Callable[..., None]) -> Callable[..., None]:
        """Replaces a method of the Trainer and returns the original."""
        replaced: Callable[..., None] | None = getattr(self._trainer, name, None)
        if replaced is None:
            raise ValueError(
                f"transformers {transformers.__version__} has no Trainer.{name}, so this version "
                "of torch_ckpt does not support it"
            )
        setattr(self._trainer, name, method)
        return replaced

    def _after_step(self, *arguments: object, **options: object) -> None:
        self._finish_step(*arguments, **options)
        state = self._trainer.state
        # Trainer calls this method twice for the last step of an epoch (the second time after the
        # epoch's evaluation), and twice for the last step if training ends within an epoch.
        is_at_end_of_epoch = float(state.epoch).is_integer()
        if is_at_end_of_epoch and self._ended_at != state.global_step:
            self._ended_at = state.global_step
        elif self._offered != state.global_step:
            self._offered = state.global_step
            self._save()
            if self.manager.should_stop:
                self._trainer.control.should_training_stop = True

    def _save(self, force: bool = False) -> None:
        step = self._trainer.state.global_step
        metrics = self._metrics if self._evaluated_at == step else {}
        best = self.manager.best_metric
        if not metrics and isinstance(best, str):
            # A step without an evaluation is not an error.
            metrics = {best: math.nan}
        # store_flos() is a collective if there are several ranks. As a hook, it runs after all
        # ranks have entered the save, so no rank waits for a failed rank in store_flos().
        with self.manager.before_save(self._trainer.store_flos):
            self.manager.save(step, self._state(), metrics=metrics, force=force)

    def _restore(self, path: str) -> None:
        if self._resume_dir is None or path != self._resume_dir.name:
            raise ValueError(
                f"a Trainer with a CheckpointCallback cannot resume from {path}. Call "
                "train(resume_from_checkpoint=callback.resume())"
            )
        self.manager.restore(self._state(), self._resumed_from)
        self._rng = RNGState().state_dict()

    def _restore_random_numbers(self, path: str | None) -> None:
        if self._rng:
            RNGState().load_state_dict(self._rng)

    def _state(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {
            "model": trainer.model_wrapped,
            # Unwrap Accelerate's optimizer: it may skip steps, unlike torch's optimizers.
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            "rng": RNGState(),
            "progress": _Progress(trainer),
        }
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        return state


class _Progress:
    """The contents of trainer_state.json, built when a save reads the state."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer
        self.text = ""

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        # TrainerState replaces the callbacks with their states.
        exported: Any = [c for c in callbacks if isinstance(c, ExportableState)]
        state = dataclasses.replace(trainer.state, stateful_callbacks=exported)
        return {"text": json.dumps(dataclasses.asdict(state))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.text = state["text"]
