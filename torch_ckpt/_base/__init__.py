"""Helpers that all parts share: the log, text formatting, progress, options and paths."""
