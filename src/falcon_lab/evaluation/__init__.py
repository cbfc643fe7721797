"""Prompts, metrics and the paired benchmark."""
