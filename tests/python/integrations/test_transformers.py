"""torch_ckpt.integrations.transformers in the real Trainer, with a small random model."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.fault_hooks import at_fault_points
from tests.support import assert_equal
from torch_ckpt.steps import MARKER_NAME

pytestmark = pytest.mark.full

transformers = pytest.importorskip("transformers", reason="no transformers")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")

from torch_ckpt.integrations.transformers import CheckpointCallback  # noqa: E402

# An epoch has 5 steps of 4 samples.
SAMPLES = 20


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer_for(root: Path, **options: Any) -> Any:
    transformers.set_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(root / "output"),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        per_device_train_batch_size=4,
        **{"save_strategy": "no", "num_train_epochs": 3, **options},
    )
    return transformers.Trainer(model, arguments, train_dataset=Samples(), eval_dataset=Samples())


class Killed(BaseException):
    """Ends training like a kill, as far as the manager and Trainer are concerned."""


class KillAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def train(
    root: Path, *, kill_at: int | None = None, manager: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Trains from the newest checkpoint beneath the root; returns the trainer."""
    trainer = trainer_for(root, **options)
    options = {"interval": 100, "preemption": None, **(manager or {})}
    with torch_ckpt.CheckpointManager(root / "checkpoints", **options) as of:
        callback = CheckpointCallback(trainer, of)
        if kill_at is not None:
            trainer.add_callback(KillAt(kill_at))
        trainer.train(resume_from_checkpoint=callback.resume())
    return trainer


def assert_same_weights(trainer: Any, other: Any) -> None:
    assert trainer.state.global_step == other.state.global_step
    assert_equal(trainer.model.state_dict(), other.model.state_dict())


def losses(trainer: Any) -> list[float]:
    return [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]


@pytest.mark.parametrize(
    ("kill_at", "options"),
    [
        pytest.param(7, {}, id="within an epoch"),
        pytest.param(10, {}, id="between epochs"),
        pytest.param(5, {"eval_strategy": "epoch"}, id="between epochs, after an evaluation"),
        pytest.param(
            6, {"eval_strategy": "steps", "eval_steps": 2}, id="after an evaluation within an epoch"
        ),
        pytest.param(4, {"gradient_accumulation_steps": 2}, id="with accumulated gradients"),
        pytest.param(
            7, {"lr_scheduler_type": "cosine", "optim": "sgd"}, id="with another optimizer"
        ),
    ],
)
def test_a_killed_run_resumes_and_ends_like_an_uninterrupted_run(
    tmp_path: Path, kill_at: int, options: dict[str, Any]
) -> None:
    manager = {"interval": kill_at}
    uninterrupted = train(tmp_path / "whole", **options)
    with pytest.raises(Killed):
        train(tmp_path / "killed", kill_at=kill_at, manager=manager, **options)
    resumed = train(tmp_path / "killed", **options)
    assert_same_weights(resumed, uninterrupted)
    assert losses(resumed) == losses(uninterrupted)


def test_metrics_of_an_evaluation_select_the_best_step(tmp_path: Path) -> None:
    rules = torch_ckpt.Retention(keep_best=1, best_metric="eval_loss", keep_last=1)
    options = {"interval": 5, "keep": rules}
    trainer = train(tmp_path, manager=options, eval_strategy="epoch", learning_rate=1e-2)
    rated = [logs["eval_loss"] for logs in trainer.state.log_history if "eval_loss" in logs]
    with torch_ckpt.CheckpointManager(
        tmp_path / "checkpoints", read_only=True, **options
    ) as manager:
        assert len(manager.all_steps()) <= 2
        best = manager.best_step()
        assert best == 5 * (1 + rated.index(min(rated)))
        assert manager.metrics(best)["eval_loss"] == min(rated)


def test_a_preemption_notice_saves_and_stops_training(tmp_path: Path) -> None:
    uninterrupted = train(tmp_path / "whole")
    trainer = trainer_for(tmp_path / "preempted")

    class Notify(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                signal.raise_signal(signal.SIGTERM)

    with torch_ckpt.CheckpointManager(
        tmp_path / "preempted" / "checkpoints", interval=100
    ) as manager:
        callback = CheckpointCallback(trainer, manager)
        trainer.add_callback(Notify())
        trainer.train(resume_from_checkpoint=callback.resume())
        assert manager.should_stop
        assert manager.all_steps() == [trainer.state.global_step]
        assert trainer.state.global_step < 15
    assert_same_weights(train(tmp_path / "preempted"), uninterrupted)


def test_callback_states_are_restored(tmp_path: Path) -> None:
    class Counting(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
        def __init__(self) -> None:
            self.steps = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.steps += 1

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"steps": self.steps}}

    options = {"restore_callback_states_from_checkpoint": True}
    for steps in (4, 9):
        trainer = trainer_for(tmp_path, max_steps=steps, **options)
        with torch_ckpt.CheckpointManager(tmp_path / "checkpoints", interval=100) as manager:
            callback = CheckpointCallback(trainer, manager)
            trainer.add_callback(Counting())
            trainer.train(resume_from_checkpoint=callback.resume())
    counting = [of for of in trainer.callback_handler.callbacks if isinstance(of, Counting)]
    assert [of.steps for of in counting] == [9]


@pytest.fixture
def full_disk_once() -> Iterator[None]:
    """Makes the next save fail in the background."""
    has_failed: list[bool] = []

    def fail_once(operation: str, path: str) -> int:
        if has_failed or operation != "rename" or not path.endswith(f"/{MARKER_NAME}"):
            return 0
        has_failed.append(True)
        return ENOSPC

    with at_fault_points(fail_once):
        yield
    assert has_failed


def complete_steps(root: Path) -> list[int]:
    with torch_ckpt.CheckpointManager(root / "checkpoints", read_only=True) as manager:
        return manager.all_steps()


def test_the_interval_of_the_manager_determines_when_to_save(tmp_path: Path) -> None:
    train(tmp_path, manager={"interval": 4})
    # The last step is always saved.
    assert complete_steps(tmp_path) == [4, 8, 12, 15]
    # Trainer writes no checkpoints of its own.
    assert not list((tmp_path / "output").glob("checkpoint-*"))


def test_a_failed_save_of_the_last_step_is_retried(tmp_path: Path, full_disk_once: None) -> None:
    train(tmp_path, manager={"interval": 15, "on_save_error": "warn_and_continue"})
    assert complete_steps(tmp_path) == [15]


def test_the_error_of_an_earlier_save_does_not_lose_the_last_step(
    tmp_path: Path, full_disk_once: None
) -> None:
    with pytest.raises(CheckpointException, match="No space left"):
        train(tmp_path, manager={"saves": torch_ckpt.manager.SaveOptions(save_on_steps=[8])})
    assert complete_steps(tmp_path) == [15]


def test_flos_are_gathered_only_before_a_save_reads_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []

    def gathering(of: Any) -> None:
        seen.append(("gathered", of.state.global_step))

    def reading(of: Any) -> dict[str, Any]:
        seen.append(("read", of.last_epoch))
        return state_dict(of)

    schedule = torch.optim.lr_scheduler.LambdaLR
    state_dict = schedule.state_dict
    train(tmp_path, max_steps=2)
    monkeypatch.setattr(schedule, "state_dict", reading)
    monkeypatch.setattr(transformers.Trainer, "store_flos", gathering)
    trainer = trainer_for(tmp_path, max_steps=6, logging_strategy="no")
    with torch_ckpt.CheckpointManager(tmp_path / "checkpoints", interval=4) as manager:
        resume = CheckpointCallback(trainer, manager).resume()
        trainer.train(resume_from_checkpoint=resume)
    saves = [(what, step) for step in (4, 6) for what in ("gathered", "read")]
    # The last call is Trainer's own, after step 6. A restore reads the state for its structure.
    assert seen == [("read", 0), *saves[:2], ("gathered", 6), *saves[2:]]


# --- what is refused -----------------------------------------------------------------------------


@pytest.fixture
def manager(tmp_path: Path) -> Any:
    with torch_ckpt.CheckpointManager(tmp_path / "checkpoints", preemption=None) as manager:
        yield manager


def test_a_save_strategy_of_trainer_and_a_second_callback_are_refused(
    tmp_path: Path, manager: Any
) -> None:
    with pytest.raises(ValueError, match=r'save_strategy is "steps"\. Set it to "no"'):
        CheckpointCallback(trainer_for(tmp_path, save_strategy="steps"), manager)
    trainer = trainer_for(tmp_path)
    CheckpointCallback(trainer, manager)
    with pytest.raises(ValueError, match="already has a CheckpointCallback"):
        CheckpointCallback(trainer, manager)


def test_a_checkpoint_written_by_trainer_is_refused(tmp_path: Path, manager: Any) -> None:
    trainer_for(tmp_path, save_strategy="epoch", num_train_epochs=1).train()
    trainer = trainer_for(tmp_path)
    CheckpointCallback(trainer, manager)
    with pytest.raises(ValueError, match=r"cannot resume from .*callback.resume\(\)"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-5"))


def test_resume_returns_none_without_a_checkpoint(tmp_path: Path, manager: Any) -> None:
    assert CheckpointCallback(trainer_for(tmp_path), manager).resume() is None


def test_a_missing_transformers_is_reported_with_the_package_to_install() -> None:
    code = (
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "import torch_ckpt.integrations.transformers\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "ModuleNotFoundError: torch_ckpt.integrations.transformers needs transformers. Run "
        "pip install 'torch_ckpt[transformers]'"
    )
