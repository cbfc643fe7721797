"""The commands, a file for each group.

Arguments are checked before anything heavy is imported: torch and what needs it are imported in
the bodies.
"""
