"""Training a drafter on a frozen target."""
