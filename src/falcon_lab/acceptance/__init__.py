"""Acceptance rules, one file each."""
