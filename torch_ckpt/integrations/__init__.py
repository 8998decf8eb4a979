"""Integrations with the training loops of other projects.

Nothing in ``torch_ckpt`` imports these modules; each module imports its project.
"""
