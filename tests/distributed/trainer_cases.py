"""Runs a Trainer of transformers or Lightning on the ranks that torchrun has started.

    python -m tests.distributed.trainer_cases WHICH FOLDER WEIGHTS STEP

WHICH is transformers, lightning, model_parallel (Lightning's, with shards) or failing.

Interrupts training before STEP, unless STEP is 0. Otherwise writes each rank's final weights to
WEIGHTS-{rank}.pt. ``failing`` is transformers' with a save of the last step that fails on one rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import torch_ckpt


class Ended(BaseException):
    """Raised to interrupt training."""


def train_transformers(folder: Path, end_before: int) -> torch.nn.Module:
    import transformers

    from tests.python.integrations.test_transformers import trainer_for
    from torch_ckpt.integrations.transformers import CheckpointCallback

    class End(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step + 1 == end_before:
                raise Ended

    trainer = trainer_for(folder, ddp_backend="gloo", eval_strategy="epoch")
    with torch_ckpt.CheckpointManager(folder / "checkpoints", interval=2) as manager:
        callback = CheckpointCallback(trainer, manager)
        trainer.add_callback(End())
        trainer.train(resume_from_checkpoint=callback.resume())
    return trainer.model


def train_failing(folder: Path, end_before: int) -> torch.nn.Module:
    """Saves only the last step, whose state one rank cannot read."""
    from tests.python.integrations.test_transformers import trainer_for
    from torch_ckpt.integrations.transformers import CheckpointCallback

    trainer = trainer_for(folder, ddp_backend="gloo", max_steps=2, logging_strategy="no")
    schedule = torch.optim.lr_scheduler.LambdaLR
    state_dict = schedule.state_dict

    def fail(of):
        schedule.state_dict = state_dict
        raise RuntimeError("no state today")

    if trainer.args.process_index == trainer.args.world_size - 1:
        schedule.state_dict = fail
    with torch_ckpt.CheckpointManager(
        folder / "checkpoints", interval=2, on_save_error="warn_and_continue"
    ) as manager:
        CheckpointCallback(trainer, manager)
        trainer.train()
        assert manager.save_errors == 1
        assert manager.last_step == 2
    return trainer.model


def train_lightning(folder: Path, end_before: int) -> torch.nn.Module:
    import lightning.pytorch as pl

    from tests.python.integrations.test_lightning import fit, plugin

    class End(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step + 1 == end_before:
                raise Ended

    resume = "last" if (folder / "last.ckpt").exists() else None
    trainer = fit(
        pl, folder, 3, plugin(), resume, ranks=int(os.environ["WORLD_SIZE"]), more=[End()]
    )
    return trainer.lightning_module


def train_model_parallel(folder: Path, end_before: int) -> torch.nn.Module:
    """Trains with Lightning's ModelParallelStrategy, which saves by DCP; FSDP2 shards the model."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from tests.python.integrations.test_lightning import batches
    from torch_ckpt.integrations.lightning import install

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
            )

        def configure_model(self) -> None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    class End(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step + 1 == end_before:
                raise Ended

    install()
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(
            data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo"
        ),
        max_epochs=3,
        callbacks=[pl.callbacks.ModelCheckpoint(dirpath=folder, save_last=True), End()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    last = folder / "last.ckpt"
    trainer.fit(Module(), batches(), ckpt_path=str(last) if last.exists() else None)
    return trainer.lightning_module


def full_tensor_of(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def main() -> None:
    which, folder, weights, end_before = sys.argv[1:]
    train = {
        "transformers": train_transformers,
        "failing": train_failing,
        "lightning": train_lightning,
        "model_parallel": train_model_parallel,
    }[which]
    try:
        model = train(Path(folder), int(end_before))
    except Ended:
        # Exits like a killed rank, without any cleanup.
        os._exit(3)
    state = {name: full_tensor_of(value) for name, value in model.state_dict().items()}
    torch.save(state, f"{weights}-{os.environ['RANK']}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
