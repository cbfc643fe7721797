"""The tree that fits a drafter and a machine: what rounds cost, what is accepted, what is best."""
