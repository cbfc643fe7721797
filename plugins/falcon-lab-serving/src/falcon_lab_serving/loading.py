"""From a server's target and the environment to what drafts beside it."""

from __future__ import annotations

import os
from typing import Any

from falcon_lab.config.saved import opened_drafter
from falcon_lab.drafters.saved import load_drafter, refuse_other_sizes
from falcon_lab.interfaces import BuildContext
from falcon_lab.plugins.discovery import load_components
from falcon_lab_serving.drafting import ServedDrafter
from falcon_lab_serving.host import ServedTarget
from falcon_lab_serving.names import DRAFTER


def load_served(
    host: ServedTarget, tree: dict[str, Any], *, nodes: int, places: int, positions: int
) -> ServedDrafter:
    """Load the drafter that the environment names onto a server's target.

    Args:
        host: the target.
        tree: the node of what is drafted.
        nodes: that the server verifies, the root among them.
        places: requests at the same time.
        positions: of the longest text.

    Raises:
        FalconLabError: it is not there, was trained for a target of other sizes, or cannot be
            served.
    """
    components = load_components()
    target: Any = host  # the loader reads of a target what a host has
    with opened_drafter(os.environ[DRAFTER], components) as folder:
        refuse_other_sizes(folder, host, "hidden_size", "vocab_size")
        drafter = load_drafter(folder, target, components, force=True)
    builder = components.build("tree_builder", tree, BuildContext.of(target, drafter))
    sizes = {"nodes": nodes, "places": places, "positions": positions}
    return ServedDrafter(drafter, builder, **sizes, device=host.device)
