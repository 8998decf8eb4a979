"""LoRA with PEFT: train adapters with DDP, save only them, and export what PEFT reads.

    pip install peft
    torchrun --nproc-per-node 2 examples/lora.py

The base model is frozen, and each run gets it from elsewhere, so a checkpoint contains only the
adapters, the optimizer and the random number generators. At the end, rank 0 writes
adapter_model.safetensors and adapter_config.json, which PeftModel.from_pretrained reads.
"""

import argparse
import logging
import os
import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torch_ckpt


class Adapters:
    """The adapters of a model, under the names that PEFT stores in files."""

    def __init__(self, model: PeftModel) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        return get_peft_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        set_peft_model_state_dict(self.model, state)


def base_model() -> nn.Module:
    """Returns the frozen base model. A real program gets it from the Hugging Face Hub."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 1))


def batch_of(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns this rank's part of a step's samples: inputs (16, 32) and targets (16, 1)."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    inputs = torch.randn(16, 32, generator=generator).to(device)
    return inputs, inputs.sin().sum(1, keepdim=True)


def export(checkpoints: str, model: PeftModel, directory: str) -> None:
    """Writes the adapters of the newest step, and their configuration, for PEFT."""
    model.peft_config["default"].save_pretrained(directory)
    torch_ckpt.convert(
        checkpoints,
        os.path.join(directory, "adapter_model.safetensors"),
        select=["adapters.*"],
        strip_prefix="adapters.",
        tensors_only=True,
        overwrite=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train adapters with DDP; start with torchrun.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--checkpoints", default="build/lora")
    parser.add_argument("--export", default="build/lora-adapters", help="directory for PEFT")
    arguments = parser.parse_args()

    # Show the log lines of rank 0 about restores and saves.
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("torch_ckpt").setLevel(logging.INFO)
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["0", "3"])
    adapted = get_peft_model(base_model(), config).to(device)
    model = DistributedDataParallel(adapted)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)

    state = {"adapters": Adapters(adapted), "optimizer": optimizer, "rng": torch_ckpt.RNGState()}
    with torch_ckpt.CheckpointManager(
        arguments.checkpoints, interval=arguments.save_every, keep=2
    ) as manager:
        first = manager.restore(state)
        if dist.get_rank() == 0:
            print(f"starts at step {first}", flush=True)
        for step in range(first, arguments.steps):
            inputs, targets = batch_of(step, device)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % arguments.save_every == 0 and dist.get_rank() == 0:
                print(f"step {step + 1:4d}  loss {loss.item():.4f}", flush=True)
            manager.save(step + 1, state, force=step + 1 == arguments.steps)
            if manager.should_stop:
                break
    if dist.get_rank() == 0:
        export(arguments.checkpoints, adapted, arguments.export)
    # Without a barrier, a rank that exits first may close connections that others still use.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
