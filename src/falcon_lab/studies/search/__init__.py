"""The search for the best options of a method's components."""
