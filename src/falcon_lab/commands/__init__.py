"""Bodies of the commands that need torch, one file for each, imported when the command runs."""
