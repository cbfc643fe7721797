"""Several heads, trained and measured alike."""
