"""Make the passes whose growth is measured: the target's step and verification, the drafter's two.

Shapes: N tree nodes, C context, B sequences, V vocabulary, F frontier blocks, k block, H hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from falcon_lab.interfaces import BuildContext, Drafter, Frontier, Observation
from falcon_lab.timing import Stopwatch
from falcon_lab.tree import TokenTree, ancestor_matrix

if TYPE_CHECKING:
    from falcon_lab.config.schema import Node
    from falcon_lab.model.target import Target
    from falcon_lab.plugins.registry import Components

STEP, VERIFY = "target, one token", "target, a tree"
FIRST, LATER = "drafter, last block", "drafter, new blocks"
"""A round's first pass with nothing new to take in, and a later pass over F blocks."""


def nothing() -> None:
    """Before or after a pass that needs no care."""


@dataclass(frozen=True)
class TimedPass:
    """Holds one pass at one size.

    Attributes:
        what: the pass.
        along: what grows.
        size: how much of it there is.
        run: the pass.
        before: brings everything into the state that it starts from.
        after: undoes what it left.
    """

    what: str
    along: str
    size: int
    run: Callable[[], object]
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing


@dataclass(frozen=True)
class Sizes:
    """States what grows, and what the rest is meanwhile.

    Attributes:
        nodes: N, and the F·k predictions of a drafter's later pass.
        contexts: C.
        batches: B.
        vocabularies: V.
        draft_vocabularies: tokens that a drafter of the largest of them (or the target's own V)
            drafts over; only for one with that option.
        tree: N where something else grows.
        context: C where something else grows.
    """

    nodes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    contexts: list[int] = field(default_factory=lambda: [64, 128, 256, 512, 1024, 2048, 4096, 8192])
    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    vocabularies: list[int] = field(default_factory=lambda: [512, 2048, 8192, 32768, 131072])
    draft_vocabularies: list[int] = field(default_factory=list)
    tree: int = 8
    context: int = 256

    @property
    def longest(self) -> int:
        """Count the positions that the largest pass needs."""
        return max(*self.contexts, self.context) + max(*self.nodes, self.tree)


def timed_passes(
    target: Target, components: Components, drafter: Node, sizes: Sizes
) -> list[TimedPass]:
    """Make every pass at every size, ready to run."""

    def drafting(host: Target, context: int, **options: int) -> Drafter:
        built: Drafter = components.build("drafter", {**drafter, **options}, BuildContext(host))
        return started(built, host, context)

    root = Frontier.root(target.device)
    long = target
    if sizes.longest > target.max_positions:
        long = shaped_like(target, max_position_embeddings=sizes.longest)
    found = [
        *along_nodes(target, drafting(target, sizes.context), sizes),
        *along_context(long, partial(drafting, long), root, sizes),
        *along_batch(target, sizes),
    ]
    for vocabulary in sizes.vocabularies:
        host = shaped_like(target, vocab_size=vocabulary)
        of_target = verifying(host, "vocabulary", vocabulary, sizes.context, sizes.tree)
        drafted = drafting(host, sizes.context)
        found += [of_target, first_pass(drafted, root, "vocabulary", vocabulary)]
    host, most = target, max(sizes.draft_vocabularies, default=0)
    if most > target.vocab_size:
        host = shaped_like(target, vocab_size=most)
    for size in sizes.draft_vocabularies:
        drafted = drafting(host, sizes.context, draft_vocabulary=size)
        found.append(first_pass(drafted, root, "draft vocabulary", size))
    return found


def along_nodes(target: Target, drafter: Drafter, sizes: Sizes) -> Iterator[TimedPass]:
    """Make passes over a tree of N nodes, and over F blocks of k tokens below the root."""
    for nodes in sizes.nodes:
        yield verifying(target, "nodes", nodes, sizes.context, nodes)
    root = Frontier.root(target.device)
    for nodes in sizes.nodes:
        if nodes % drafter.block == 0:
            blocks = nodes // drafter.block
            tokens = torch.ones(blocks, drafter.block, dtype=torch.long, device=target.device)
            later = Frontier(tokens, torch.zeros_like(tokens[:, 0]))
            run = partial(drafter.draft, later)
            yield TimedPass(LATER, "nodes", nodes, run, before=partial(drafter.draft, root))


def along_context(
    target: Target, drafting: Callable[[int], Drafter], root: Frontier, sizes: Sizes
) -> Iterator[TimedPass]:
    """Make passes behind C positions."""
    for context in sizes.contexts:
        yield verifying(target, "context", context, context, 1)
        yield verifying(target, "context", context, context, sizes.tree)
        yield first_pass(drafting(context), root, "context", context)


def along_batch(target: Target, sizes: Sizes) -> Iterator[TimedPass]:
    """Make passes over B trees."""
    for batch in sizes.batches:
        cache = target.new_batch_cache(batch, sizes.context + sizes.tree)
        for place in range(batch):
            alone = cache.open(place)
            target.prefill(text(sizes.context, target), alone)
            cache.fill(place, sizes.context)
        trees = [tree_of(sizes.tree, target.device)] * batch
        yield TimedPass(VERIFY, "batch", batch, partial(target.verify_batch, trees, cache))


def verifying(target: Target, along: str, size: int, context: int, nodes: int) -> TimedPass:
    """Make the target's pass over a tree (or a token) behind a context."""
    cache = target.new_cache(context + nodes)
    target.prefill(text(context, target), cache)
    return TimedPass(
        STEP if nodes == 1 and along == "context" else VERIFY,
        along,
        size,
        partial(target.verify, tree_of(nodes, target.device), cache),
        after=partial(cache.truncate, context),
    )


def first_pass(drafter: Drafter, root: Frontier, along: str, size: int) -> TimedPass:
    """Make the first pass of a round."""
    return TimedPass(FIRST, along, size, partial(drafter.draft, root))


def started(drafter: Drafter, target: Target, context: int) -> Drafter:
    """Let a drafter read a context; the drafter."""
    if isinstance(drafter, nn.Module):
        drafter.to(target.device, target.dtype).eval()
    layers = drafter.taps
    features = torch.randn(context, target.hidden_size, device=target.device, dtype=target.dtype)
    tokens = text(context, target)
    drafter.reset(tokens[0])
    of_each = (len(layers), target.hidden_size)
    drafter.observe(
        Observation(
            tokens,
            features if "features" in drafter.needs else None,
            taps=features[:, None].expand(-1, *of_each) if layers else None,
        )
    )
    drafter.draft(Frontier.root(target.device))
    return drafter


def tree_of(nodes: int, device: torch.device) -> TokenTree:
    """Make a binary tree."""
    parents = torch.tensor([-1, *((node - 1) // 2 for node in range(1, nodes))], device=device)
    ancestors = ancestor_matrix(parents)
    return TokenTree(
        torch.ones(nodes, dtype=torch.long, device=device),
        parents,
        ancestors.sum(-1) - 1,
        ancestors,
        "deterministic",
        torch.zeros(nodes, device=device),
    )


def text(length: int, target: Target) -> Tensor:
    """Make some tokens, ``[length]``."""
    return torch.arange(length, device=target.device) % target.vocab_size


def shaped_like(target: Target, **changes: int) -> Target:
    """Make a model of the target's shape with ``changes`` of its configuration, weights random."""
    from transformers import AutoModelForCausalLM

    from falcon_lab.model.target import Target as Made

    config = copy.deepcopy(target.config)
    for key, value in changes.items():
        setattr(config, key, value)
    config.pad_token_id = None
    model = AutoModelForCausalLM.from_config(
        config, dtype=target.dtype, attn_implementation=target.backbone.implementation
    ).to(target.device)
    lean = target.backbone.lean is not None
    return Made(model, target.tokenizer, name=f"{target.name}-shaped", lean=lean)


def once(timed: TimedPass, device: torch.device) -> float:
    """Return the seconds of one pass; what prepares it and cleans up after it is not timed."""
    timed.before()
    with Stopwatch(device) as watch:
        timed.run()
    timed.after()
    return watch.wall
