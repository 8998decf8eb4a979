"""The package's logger, and warnings that never raise."""

from __future__ import annotations

import logging
import warnings

#: The package's logger. Each finished background save logs one record, with ``record.metrics``.
LOGGER = logging.getLogger("torch_ckpt")


def warn(text: str, stacklevel: int = 2) -> None:
    """Issues a warning, but never raises. May be called during exchanges between ranks, and after a
    commit.

    Args:
        stacklevel: stack level as in ``warnings.warn``, counted from the caller.
    """
    try:
        warnings.warn(text, stacklevel=stacklevel + 1)
    except Warning:
        # A warning filter has turned the warning into an error.
        LOGGER.warning("%s", text)
