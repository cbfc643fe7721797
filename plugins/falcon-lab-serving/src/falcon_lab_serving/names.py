"""What both servers are told by the environment."""

from __future__ import annotations

DRAFTER = "FALCON_LAB_SERVED_DRAFTER"
"""Folder or name of the drafter; servers read what their arguments name as a Hugging Face model."""
