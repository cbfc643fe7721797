"""Templates of Python definitions, from which the generated corpus is composed."""
