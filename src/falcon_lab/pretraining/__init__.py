"""Targets that are trained from scratch here."""
