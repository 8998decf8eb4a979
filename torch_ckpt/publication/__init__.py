"""Publishes versions of a model for the programs that read them."""
