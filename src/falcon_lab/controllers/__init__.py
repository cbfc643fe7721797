"""Draft-length controllers, one file each."""
