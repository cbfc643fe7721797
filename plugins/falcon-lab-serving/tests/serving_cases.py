"""A tiny target, Falcon's head for it, and a server that verifies trees of given shape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from falcon_lab_serving.drafting import DraftedTree, ServedDrafter
from falcon_lab_serving.host import ServedTarget

from falcon_lab import testing
from falcon_lab.interfaces import BuildContext
from falcon_lab.plugins.discovery import load_components

KNOWN = load_components()
HEAD = {"name": "falcon", "block": 2, "layers": 1, "fuse": "lstm"}
NODES = 6


@cache
def target() -> Any:
    """The target, which the server holds too."""
    return testing.tiny_target("llama", vocab=12, layers=2)


@cache
def host() -> ServedTarget:
    """The same by its tables alone, padded as a server's are."""
    model = target().model
    tables = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    padded = [torch.cat([table, torch.full((4, table.shape[1]), 9.0)]) for table in tables]
    return ServedTarget("tiny", *padded, model.config, target().tokenizer)


def drafter(by: Any = None, **options: Any) -> Any:
    """A head with weights that are always the same."""
    torch.manual_seed(0)
    made = KNOWN.build("drafter", {**HEAD, **options}, BuildContext(host=by or host()))
    return made.to(torch.float32).eval()


def served(made: Any, tree: dict[str, Any], **options: Any) -> ServedDrafter:
    """What a server drafts with."""
    builder = KNOWN.build("tree_builder", tree, BuildContext.of(host(), made))
    sizes = {"nodes": NODES, "places": 2, "positions": 200} | options
    return ServedDrafter(made, builder, device=torch.device("cpu"), **sizes)


class Server:
    """Verifies greedily by whole passes over every path: slow, and plain to see through."""

    def __init__(self, drafting: ServedDrafter) -> None:
        self.drafting = drafting
        self.texts: dict[str, list[int]] = {}
        self.trees: list[DraftedTree] = []
        self.rounds = 0

    @staticmethod
    @torch.no_grad()
    def features(tokens: Sequence[int]) -> torch.Tensor:
        """``[T, H]``, what the LM head reads."""
        states: torch.Tensor = target().model.model(torch.tensor([tokens])).last_hidden_state[0]
        return states

    def next_token(self, features: torch.Tensor) -> int:
        """The most likely one."""
        return int(target().head(features).argmax())

    def admit(self, name: str, prompt: list[int], chunk: int = 100) -> None:
        """Read a prompt in chunks, and draw its first token."""
        rows = self.features(prompt)
        for start in range(0, len(prompt), chunk):
            self.drafting.read(name, start, rows[start : start + chunk])
        self.texts[name] = [*prompt, self.next_token(rows[-1])]

    def run(self) -> None:
        """One round of all requests."""
        self.trees = self.drafting.draft(self.texts)
        self.rounds += 1
        for (name, text), tree in zip(list(self.texts.items()), self.trees, strict=True):
            assert len(tree.tokens) == NODES
            assert tree.tokens[0] == text[-1]
            rows = torch.stack([self.at(text, tree, node) for node in range(NODES)])
            self.drafting.verified(name, rows)
            node, added = 0, [self.next_token(rows[0])]
            while (path := tree.path(added)) is not None:
                node = path[-1]
                added.append(self.next_token(rows[node]))
            self.texts[name] = text + added

    def at(self, text: list[int], tree: DraftedTree, node: int) -> torch.Tensor:
        """The feature at a node."""
        path: list[int] = []
        while node > 0:
            path.insert(0, tree.tokens[node])
            node = tree.parents[node]
        return self.features([*text, *path])[-1]
