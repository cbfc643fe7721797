"""A generated corpus of small Python programs."""
