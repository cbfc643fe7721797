"""Saved drafters in the formats of other programs, and back."""
