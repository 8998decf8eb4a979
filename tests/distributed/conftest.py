"""The fixture of the cases of a file."""

from tests.distributed.launcher import launches

__all__ = ["launches"]
