"""Checkpoints of transformers' Trainer through a :class:`torch_ckpt.CheckpointManager`.

    manager = torch_ckpt.CheckpointManager("checkpoints", keep_last=3)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    callback = CheckpointCallback(trainer, manager)
    trainer.train(resume_from_checkpoint=callback.resume())

Note [The moments of a save and of a restore]
Callbacks alone can neither save nor restore exactly: Trainer evaluates after ``on_step_end``, which
draws random numbers, and it works out its place in the data from a ``trainer_state.json`` before
the first callback runs. So methods of this one Trainer are replaced: a step is offered to the
manager where Trainer has logged and evaluated, the last one of an epoch after the epoch's own
evaluation, and each part is restored where Trainer would load it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch_ckpt

try:
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "torch_ckpt.integrations.transformers needs transformers: "
        "pip install 'torch_ckpt[transformers]'"
    ) from error
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

__all__ = ["CheckpointCallback"]

# Where Trainer looks for its state in what it resumes from.
_STATE_FILE = "trainer_state.json"


class CheckpointCallback(transformers.TrainerCallback):
    """Saves and restores all of a Trainer's run: weights, optimizer, schedule, scaler, counters,
    logs, the states of its callbacks, and each rank's random numbers.

    It adds itself to the Trainer, which then writes no checkpoints of its own: the manager's
    interval and rules say which steps are saved and kept, and the last step is saved in any case.
    After a notice of preemption the step agreed on is saved, and training stops.
    The numbers of an evaluation at the same step are the checkpoint's metrics.

    Args:
        trainer: before its ``train``, with ``save_strategy="no"``.
        manager: closed by whoever made it; the end of training waits for its saves.

    Raises:
        ValueError: the trainer saves itself; it has such a callback; DeepSpeed is used, which has
            checkpoints of its own; this version of transformers has another Trainer.
    """

    def __init__(
        self, trainer: transformers.Trainer, manager: torch_ckpt.CheckpointManager
    ) -> None:
        if trainer.is_deepspeed_enabled:
            raise ValueError("DeepSpeed saves its sharded states itself: use its checkpoints")
        strategy = SaveStrategy(trainer.args.save_strategy)
        if strategy is not SaveStrategy.NO:
            raise ValueError(
                f'save_strategy is "{strategy.value}": set it to "no", the '
                "manager's interval says when to save"
            )
        if any(isinstance(of, CheckpointCallback) for of in trainer.callback_handler.callbacks):
            raise ValueError("this Trainer has a CheckpointCallback already")
        self.manager = manager
        self._trainer = trainer
        self._metrics: dict[str, float] = {}
        self._evaluated_at = self._ended_at = self._offered = -1
        self._resumed_from: int | None = None
        self._resume_dir: tempfile.TemporaryDirectory[str] | None = None
        self._rng: dict[str, Any] = {}
        # See Note [The moments of a save and of a restore].
        self._finish_step = self._replace("_maybe_log_save_evaluate", self._after_step)
        self._replace("_save_checkpoint", lambda model, trial: self._save(force=True))
        self._replace("_load_from_checkpoint", lambda path, model=None: None)
        self._replace("_load_optimizer_and_scheduler", self._restore)
        self._replace("_load_scaler", lambda path: None)
        self._replace("_load_rng_state", self._restore_random_numbers)
        trainer.add_callback(self)

    def resume(self, step: int | None = None) -> str | None:
        """What to give to ``trainer.train(resume_from_checkpoint=...)``; all ranks call it.

        Args:
            step: the step to go on from; the newest one if None.

        Returns:
            None where there is nothing to resume from. Otherwise a directory with the state by
            which Trainer finds its place in the data; the rest is restored when Trainer asks for
            it.

        Raises:
            CheckpointException: with the cause of each rank that failed.
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
        **_: Any,
    ) -> None:
        if self._evaluated_at != state.global_step:
            self._metrics, self._evaluated_at = {}, state.global_step
        numbers = (metrics or {}).items()
        self._metrics |= {name: of for name, of in numbers if isinstance(of, int | float)}

    def on_train_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **_: Any,
    ) -> None:
        try:
            self.manager.wait_until_finished()
        finally:
            # Whether a save has failed all ranks know alike at its end only; an earlier one's error
            # is not a reason to lose the last step.
            if self.manager.last_step != state.global_step:
                self._save(force=True)
                self.manager.wait_until_finished()
        if self._resume_dir is not None:
            self._resume_dir.cleanup()

    # --- instead of Trainer's methods -------------------------------------------------------

    def _replace(self, name: str, method: Callable[..., None]) -> Callable[..., None]:
        """Returns what it replaced."""
        replaced: Callable[..., None] | None = getattr(self._trainer, name, None)
        if replaced is None:
            raise ValueError(
                f"transformers {transformers.__version__} has no Trainer.{name}: this version of "
                "torch_ckpt does not know how its Trainer saves"
            )
        setattr(self._trainer, name, method)
        return replaced

    def _after_step(self, *arguments: Any, **options: Any) -> None:
        self._finish_step(*arguments, **options)
        state = self._trainer.state
        # The last step of an epoch comes here twice, the second time after the epoch's evaluation.
        # Other steps do where training ends within an epoch.
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
            # It has not been evaluated: that is not an error.
            metrics = {best: math.nan}
        # On several ranks it is a collective: while the state is read, the others would wait in it
        # for a rank that has failed before.
        with self.manager.before_save(self._trainer.store_flos):
            self.manager.save(step, self._state(), metrics=metrics, force=force)

    def _restore(self, path: str) -> None:
        if self._resume_dir is None or path != self._resume_dir.name:
            raise ValueError(
                f"Trainer is to resume from {path}: with a CheckpointCallback give its resume() to "
                "train(resume_from_checkpoint=...)"
            )
        self.manager.restore(self._state(), self._resumed_from)
        self._rng = torch_ckpt.RNGState().state_dict()

    def _restore_random_numbers(self, path: str | None) -> None:
        if self._rng:
            torch_ckpt.RNGState().load_state_dict(self._rng)

    def _state(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {
            "model": trainer.model_wrapped,
            # Accelerate's wrapper skips steps, which torch does not expect of an optimizer.
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            "rng": torch_ckpt.RNGState(),
            "progress": _Progress(trainer),
        }
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        return state


class _Progress:
    """What Trainer keeps in trainer_state.json, as text: it is gathered when a save wants it."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer
        self.text = ""

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        # TrainerState makes their states of them.
        exported: Any = [of for of in callbacks if isinstance(of, ExportableState)]
        state = dataclasses.replace(trainer.state, stateful_callbacks=exported)
        return {"text": json.dumps(dataclasses.asdict(state))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.text = state["text"]
