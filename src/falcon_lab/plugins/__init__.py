"""Components: the hook, the registry, discovery and the built-in ones."""
