"""The package's logger, and warnings that never raise."""

from __future__ import annotations

import logging
import warnings

#: The logger of the package. A finished background save is one record, with ``record.metrics``.
LOGGER = logging.getLogger("torch_ckpt")


def warn(text: str, stacklevel: int = 2) -> None:
    """Warns, and never raises, so that it may be called during exchanges between ranks or after a
    commit.

    Args:
        stacklevel: stack level as for ``warnings.warn``, counted from the caller.
    """
    try:
        warnings.warn(text, stacklevel=stacklevel + 1)
    except Warning:
        # A warning filter turns warnings into errors.
        LOGGER.warning("%s", text)
