"""Target language models: loading, the tree forward, masks and the KV cache."""
