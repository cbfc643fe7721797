"""What is shown and shared of a measurement."""
