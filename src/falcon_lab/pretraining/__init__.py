"""The targets that are trained from scratch here: made by a recipe, and judged."""
