"""Attention backends that read the context without a mask."""
