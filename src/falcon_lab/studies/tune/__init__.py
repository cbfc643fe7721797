"""The search for the fastest tree of a drafter."""
