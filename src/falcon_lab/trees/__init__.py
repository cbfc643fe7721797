"""The token tree and the builders that grow one."""
