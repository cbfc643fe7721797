"""The words that names and docstrings are composed of."""

from __future__ import annotations

NOUNS = [
    "order",
    "ticket",
    "sensor",
    "invoice",
    "planet",
    "rocket",
    "garden",
    "window",
    "camera",
    "bottle",
    "letter",
    "packet",
    "account",
    "record",
    "signal",
    "channel",
    "server",
    "market",
    "river",
    "forest",
    "engine",
    "bridge",
    "player",
    "course",
    "lesson",
    "recipe",
    "branch",
    "worker",
    "vehicle",
    "parcel",
    "region",
    "device",
    "message",
    "project",
    "meeting",
    "booking",
    "painting",
    "village",
    "product",
    "station",
]
"""Things; every plural takes an s."""

ATTRIBUTES = [
    "price",
    "weight",
    "height",
    "width",
    "length",
    "score",
    "speed",
    "level",
    "depth",
    "amount",
    "volume",
    "rank",
    "size",
    "age",
    "rate",
    "cost",
    "energy",
    "power",
    "distance",
    "pressure",
    "salary",
    "balance",
    "budget",
    "margin",
    "radius",
    "delay",
    "offset",
    "capacity",
    "priority",
    "version",
    "duration",
    "degree",
    "charge",
    "reward",
]
"""Whole-number properties of a thing."""

COLOURS = ("red", "blue", "green", "black", "white", "yellow", "orange", "purple")
KINDS = ("small", "large", "open", "closed", "new", "old", "active", "hidden", "local", "remote")
PEOPLE = ("ada", "alan", "grace", "edsger", "barbara", "donald", "frances", "john")


def plural(word: str) -> str:
    """The plural of a noun or an attribute: ``capacity`` -> ``capacities``."""
    return word[:-1] + "ies" if word.endswith("ty") else word + "s"
