"""The measurements: evaluate, compare, tune and bench."""
