"""The package's version, and the versions of torch that it supports."""

import re
import warnings

__version__ = "0.1.0"

#: The first supported version, and the first later version that is not. As in pyproject.toml.
SUPPORTED_TORCH = ((2, 11), (2, 16))


def check_torch_version(version: str) -> None:
    """Checks that this version of torch is supported.

    Warns if it is newer than the tested versions.

    Args:
        version: ``torch.__version__``.

    Raises:
        ImportError: the version is too old.
    """
    first, end = SUPPORTED_TORCH
    number = re.match(r"(\d+)\.(\d+)", version)
    found = (int(number[1]), int(number[2])) if number else end
    supported = f"torch {first[0]}.{first[1]} to {end[0]}.{end[1] - 1}"
    requirement = f"'torch>={first[0]}.{first[1]},<{end[0]}.{end[1]}'"
    if found < first:
        raise ImportError(
            f"torch_ckpt {__version__} supports {supported}, but found torch {version}: run "
            f"`pip install {requirement}`, then reinstall torch_ckpt"
        )
    if found >= end:
        warnings.warn(
            f"torch_ckpt {__version__} is tested with {supported}, but not with torch {version}: "
            f"test a save and a restore before you rely on it, or install {requirement}",
            stacklevel=3,
        )
