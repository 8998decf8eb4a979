"""Inspection of checkpoints: their items, their integrity, and differences between two."""
