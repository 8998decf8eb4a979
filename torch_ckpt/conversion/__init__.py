"""Converts checkpoints to and from other formats."""
