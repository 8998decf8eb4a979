"""Conversion of checkpoints to and from other formats."""
