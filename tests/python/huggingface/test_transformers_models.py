"""Models of transformers that are saved in Hugging Face's layout and loaded by from_pretrained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.support import assert_equal

transformers = pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, **more))


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


class WithBuffer(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A model with a buffer that its state dict contains."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("scale", torch.arange(5.0))
        self.post_init()


def with_buffer() -> Any:
    torch.manual_seed(0)
    return WithBuffer(transformers.LlamaConfig(**TINY))


MODELS = {
    "llama": llama,
    "llama with tied embeddings": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "a buffer": with_buffer,
}


def save(model: Any, tmp_path: Path, **options: Any) -> Path:
    """Saves a model and its configuration. Returns the directory.

    Args:
        options: of :class:`torch_ckpt.Safetensors`.
    """
    model.config.save_pretrained(tmp_path / "config")
    format = torch_ckpt.Safetensors(config=tmp_path / "config", **options)
    torch_ckpt.save(model.state_dict(), tmp_path / "model", format=format, no_dist=True)
    return tmp_path / "model"


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_is_loaded_with_no_missing_and_no_unexpected_key(
    tmp_path: Path, name: str
) -> None:
    model = MODELS[name]()
    path = save(model, tmp_path, max_shard_size=10_000)
    loaded, info = type(model).from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    assert_equal(loaded.state_dict(), model.state_dict())


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    model = gpt2()
    report = torch_ckpt.preflight(model.state_dict(), save(model, tmp_path))
    assert report.missing == []
