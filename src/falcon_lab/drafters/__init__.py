"""Drafter heads, one file each."""
