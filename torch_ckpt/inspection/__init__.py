"""Inspects checkpoints: lists their contents, verifies them and compares them."""
