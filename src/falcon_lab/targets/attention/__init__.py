"""Attention kernels beside Hugging Face's own: what every row sees needs no mask."""
