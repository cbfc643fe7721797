"""A server that runs the target."""
