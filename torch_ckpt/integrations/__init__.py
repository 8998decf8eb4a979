"""Integrations with other projects' training loops.

Nothing in ``torch_ckpt`` imports these modules. Each module imports the project that it supports.
"""
