"""Sizes on command lines."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Parses a number of bytes, such as '2GB', '512 MiB' or '1000000'."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"not a size: {text!r} (examples: 2GB, 512MiB)")
    return int(float(match[1]) * _UNITS[match[2].upper()])
