"""Reads a transformers ``config.json``, sets its dtype, and finds tied weights."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from typing import Any

import torch

from torch_ckpt.errors import CheckpointError

#: Name of the file from which transformers reads a model's configuration.
CONFIG_NAME = "config.json"

# Older transformers versions write the first key, newer ones the second; all read both.
_DTYPE_KEYS = ("torch_dtype", "dtype")

_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
)


class Config:
    """A model's configuration.

    Args:
        path: a ``config.json`` file, or a directory that contains one.

    Raises:
        CheckpointError: the file is not a JSON object.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str) -> None:
        if os.path.isdir(path):
            path = os.path.join(path, CONFIG_NAME)
        with open(path, "rb") as stream:
            self._text = stream.read()
        try:
            self._values = json.loads(self._text)
        except ValueError:
            self._values = None
        if not isinstance(self._values, dict):
            raise CheckpointError(f"{path} is not a JSON object. Pass a model's {CONFIG_NAME}")

    def text(self, dtype: torch.dtype | None) -> bytes:
        """Returns the file's text; if a dtype is given, replaces the dtype of the weights."""
        if dtype is None:
            return self._text
        name = str(dtype).removeprefix("torch.")
        values = _with_dtype(self._values, name)
        if not any(key in values for key in _DTYPE_KEYS):
            values[_DTYPE_KEYS[0]] = name
        return json.dumps(values, indent=2).encode() + b"\n"

    def tied_names(self, names: list[str]) -> list[str]:
        """Returns the names of weights that the model ties to others.

        Returns an empty list if transformers is not installed or does not know the model.
        """
        if self._values.get("tie_word_embeddings") is False:
            return []
        patterns = [pattern for kind in self._model_classes() for pattern in _tied_patterns(kind)]
        return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]

    def _model_classes(self) -> list[Any]:
        if importlib.util.find_spec("transformers") is None:
            return []
        import transformers
        from transformers.models.auto import modeling_auto

        classes = self._values.get("architectures")
        if not isinstance(classes, list):
            kind = self._values.get("model_type")
            classes = [getattr(modeling_auto, mapping, {}).get(kind) for mapping in _MAPPINGS]
        found = [getattr(transformers, name, None) for name in classes if isinstance(name, str)]
        return [kind for kind in found if kind is not None]


def _with_dtype(values: dict[str, Any], name: str) -> dict[str, Any]:
    changed = dict(values)
    for key, value in values.items():
        if key in _DTYPE_KEYS:
            changed[key] = name
        # Configurations of submodels, such as text_config. Quantization has its own dtypes.
        elif key.endswith("_config") and key != "quantization_config" and isinstance(value, dict):
            changed[key] = _with_dtype(value, name)
    return changed


def _tied_patterns(model_class: Any) -> list[str]:
    keys = getattr(model_class, "_tied_weights_keys", None) or ()
    return [key for key in keys if isinstance(key, str)]
