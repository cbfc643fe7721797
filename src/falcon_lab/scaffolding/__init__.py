"""Distributions to begin from: ``falcon-lab new-plugin``."""
