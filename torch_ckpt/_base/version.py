"""The package's version, and the versions of torch that it supports."""

import re
import warnings

__version__ = "0.1.0"

#: The first supported version, and the first later version that is not tested.
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
    oldest = f"torch>={first[0]}.{first[1]}"
    if found < first:
        raise ImportError(
            f"torch_ckpt {__version__} needs {oldest}, but found torch {version}: run "
            f"`pip install '{oldest}'`"
        )
    if found >= end:
        warnings.warn(
            f"torch_ckpt {__version__} is tested with torch {first[0]}.{first[1]} to "
            f"{end[0]}.{end[1] - 1}, but not with torch {version}: test a save and a restore "
            f"before you rely on it, or install '{oldest},<{end[0]}.{end[1]}'",
            stacklevel=3,
        )
