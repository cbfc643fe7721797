"""Training of a drafter by distillation from the frozen target."""
