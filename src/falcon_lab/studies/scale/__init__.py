"""``falcon-lab plan``: what training would take where one machine is not enough."""
