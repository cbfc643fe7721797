"""The typed experiment: its schema, and how a YAML with overrides becomes one."""
