"""Distillation objectives, one file each."""
