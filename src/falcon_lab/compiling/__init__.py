"""Forward passes of fixed shape, compiled ahead of time."""
