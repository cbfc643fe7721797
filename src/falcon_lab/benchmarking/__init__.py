"""``falcon-lab bench``: decoding against what users would pick instead, and against the machine."""
