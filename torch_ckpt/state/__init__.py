"""The state of a training program, and its way back."""
