"""The package's logger, and warnings that never raise."""

from __future__ import annotations

import logging
import warnings

#: Receives one record for each finished background save, with the metrics as ``record.metrics``.
LOGGER = logging.getLogger("torch_ckpt")


def warn(text: str, stacklevel: int = 2) -> None:
    """Warns, and never raises: amid what ranks do together, or after what cannot fail any more.

    Args:
        stacklevel: as of ``warnings.warn``, counted from the caller.
    """
    try:
        warnings.warn(text, stacklevel=stacklevel + 1)
    except Warning:
        # A filter makes errors of warnings.
        LOGGER.warning("%s", text)
