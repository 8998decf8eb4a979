"""Conversion of the state of a training program into a state dict, and back."""
