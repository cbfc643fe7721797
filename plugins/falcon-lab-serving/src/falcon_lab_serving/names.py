"""What servers are told by the environment."""

from __future__ import annotations

import json
import os
from typing import Any

DRAFTER = "FALCON_LAB_SERVED_DRAFTER"
"""Folder or name of the drafter; servers read what their arguments name as a Hugging Face model."""

TREE = "FALCON_LAB_SERVED_TREE"
"""The tree's node as JSON, for SGLang; vLLM has chains."""


def tree_node(nodes: int) -> dict[str, Any]:
    """Return the tree that is drafted.

    Args:
        nodes: that the server verifies, the root among them.

    Raises:
        ValueError: the variable of the environment is no JSON object.
    """
    text = os.environ.get(TREE)
    if not text:
        return {"name": "dynamic", "nodes": nodes - 1}
    try:
        node = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{TREE} is no JSON: {error}") from error
    if not isinstance(node, dict) or not isinstance(node.get("name"), str):
        raise ValueError(f'{TREE} is {text}, and should be like {{"name": "chain", "depth": 4}}')
    return node
