"""Helpers shared by all packages: logging, text formatting, progress, options and paths."""
