"""The package's logger, and warnings that never raise."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings

#: The package's logger. Each finished background save logs one record, with ``record.metrics``.
LOGGER = logging.getLogger("torch_ckpt")

# Functions of this package that are decorated with a context manager are called by contextlib.
_PACKAGE = (os.path.join(os.path.dirname(os.path.dirname(__file__)), ""), contextlib.__file__)


def warn(text: str) -> None:
    """Issues a warning, but never raises. May be called during exchanges between ranks, and after a
    commit. The warning is attributed to the line outside this package that called it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    try:
        warnings.warn(text, stacklevel=level)
    except Warning:
        # A warning filter has turned the warning into an error.
        LOGGER.warning("%s", text)
