"""The measurement of decoding loops."""
