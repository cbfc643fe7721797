"""Glancing schedules, one file each."""
