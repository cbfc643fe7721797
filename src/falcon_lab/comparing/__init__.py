"""``falcon-lab compare``: several drafter heads on equal terms."""
