"""Temporary: stands in for ``_core.so`` beside an extension that was built before it existed.

Python prefers ``_core.so``. Delete this file once every build has it.
"""

from typing import Any

import torch

import torch_ckpt._C as _C
from torch_ckpt._C import *  # type: ignore[assignment]  # noqa: F403


def verify_records(files: Any, rows: Any, **options: Any) -> Any:
    """Calls the former function, which takes dtypes of torch and not their names."""
    given = [(*row[:3], row[3] and getattr(torch, row[3]), row[4]) for row in rows]
    return _C.verify_records(files, given, **options)  # type: ignore[attr-defined]
