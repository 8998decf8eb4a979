"""Writes models in Hugging Face's layout, by all ranks at once."""
