"""The target's greedy texts, on which a drafter is replayed without the target.

The target's own text is all that decides what a greedy round accepts. Once it is known, a round of
any tree is replayed with the drafter's passes and without the target's.

Shapes: P prompt tokens, A answer tokens, T = P + A, L tapped layers, H hidden, F frontier blocks,
k block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.interfaces import (
    Budget,
    Drafter,
    Frontier,
    LengthController,
    Observation,
    RoundContext,
    RoundOutcome,
    TreeBuilder,
)
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree

if TYPE_CHECKING:
    from falcon_lab.config.schema import DecodingConfig
    from falcon_lab.decoding.stopping import StopCondition
    from falcon_lab.model.target import Target


@dataclass(frozen=True)
class Text:
    """A prompt and the target's greedy answer.

    Attributes:
        tokens: ``[T]`` long.
        features: ``[T - 1, H]`` of all but the last token.
        prompt: P.
        limit: most tokens that the answer could have had; A when it was not ended.
        taps: ``[T - 1, L, H]`` of a target that is tapped, or None.
    """

    tokens: Tensor
    features: Tensor
    prompt: int
    limit: int
    taps: Tensor | None = None

    def observed(self, drafter: Drafter, start: int, stop: int) -> Observation:
        """Return the observation of positions ``start`` to ``stop``."""
        return Observation(
            self.tokens[start + 1 : stop + 1],
            self.features[start:stop] if "features" in drafter.needs else None,
            taps=None if self.taps is None else self.taps[start:stop],
        )

    @property
    def answer(self) -> int:
        """Return A, the tokens of the answer."""
        return self.tokens.shape[0] - self.prompt


@torch.inference_mode()
def write_texts(
    target: Target,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    stop: StopCondition,
    decoding: DecodingConfig,
) -> list[Text]:
    """Let the target answer every prompt (``[P]`` long) greedily.

    Raises:
        FalconLabError: a prompt is longer than the target's context.
    """
    answers = PlainEngine(target, decoding=decoding).generate_batch(
        prompts,
        batch_size=1,  # batched passes round differently in half precision
        max_new_tokens=max_new_tokens,
        sampling=Sampling(),
        generators=[torch.Generator(target.device)] * len(prompts),
        stop=stop,
    )
    texts = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.cat((prompt, torch.tensor(answer.tokens, device=prompt.device)))
        cache = target.new_cache(len(tokens))
        output = target.prefill(tokens[:-1], cache, chunk=decoding.prefill_chunk)
        limit = min(max_new_tokens, target.max_positions - len(prompt))
        texts.append(Text(tokens, output.features, len(prompt), limit, output.taps))
    return texts


class Reader:
    """A drafter that is led through a text, from one round's root to the next.

    Args:
        text: what is read.
        drafter: observes every token as if the target had just accepted it.
        skip: answer tokens that count as the prompt's.

    Attributes:
        at: place of the root, the newest token known.
    """

    def __init__(self, text: Text, drafter: Drafter, skip: int = 0) -> None:
        self.text = text
        self.drafter = drafter
        self.at = 0
        drafter.reset(text.tokens[0])
        self.advance(min(text.prompt + skip, len(text.tokens) - 1))

    @property
    def root(self) -> Tensor:
        """Return the root, a 0-d long tensor."""
        return self.text.tokens[self.at]

    @property
    def room(self) -> int:
        """Count the tokens of the text behind the root."""
        return self.text.tokens.shape[0] - 1 - self.at

    @property
    def limit(self) -> int:
        """Longest path that a round may draft: decoding stops at a number of tokens."""
        return self.text.prompt + self.text.limit - 2 - self.at

    def newest(self, count: int) -> list[int]:
        """Return the newest tokens, the root last."""
        found: list[int] = self.text.tokens[max(0, self.at + 1 - count) : self.at + 1].tolist()
        return found

    def truth(self, count: int) -> list[int]:
        """Return the next tokens, at most ``count``."""
        found: list[int] = self.text.tokens[self.at + 1 : self.at + 1 + count].tolist()
        return found

    def advance(self, count: int) -> None:
        """Tell the drafter of the next tokens."""
        stop = self.at + count
        self.drafter.observe(self.text.observed(self.drafter, self.at, stop))
        self.at = stop


@dataclass(frozen=True)
class ReplayedRound:
    """What a round did.

    Attributes:
        nodes: draft tokens that the target would have verified.
        blocks: F of every drafter pass.
        emitted: tokens added to the text, the target's own one included.
    """

    nodes: int
    blocks: tuple[int, ...]
    emitted: int


@torch.inference_mode()
def replay(
    text: Text, drafter: Drafter, builder: TreeBuilder, controller: LengthController
) -> Iterator[ReplayedRound]:
    """The rounds of greedy speculative decoding, without the target's passes."""
    reader = Reader(text, drafter)
    generator = torch.Generator(text.tokens.device)
    controller.begin_sequence(Sampling())
    controller.reset()
    while reader.room:
        wanted = controller.budget()
        depth = reader.limit if wanted.depth is None else min(wanted.depth, reader.limit)
        budget = Budget(depth, wanted.nodes, wanted.passes)
        context = RoundContext(reader.root, budget, Sampling(), generator, reader.newest)
        tree, blocks = _draft(drafter, builder, controller, context)
        accepted = right(tree, reader.truth(tree.nodes))
        emitted = min(accepted + 1, reader.room)
        controller.update(RoundOutcome(tree.max_depth, tree.drafted, accepted, tree=tree))
        reader.advance(emitted)
        yield ReplayedRound(tree.drafted, blocks, emitted)


def _draft(
    drafter: Drafter, builder: TreeBuilder, controller: LengthController, context: RoundContext
) -> tuple[TokenTree, tuple[int, ...]]:
    blocks: list[int] = []
    frontier: Frontier | None = builder.start(context)
    if frontier is not None:
        drafter.begin_round(context)
    while frontier is not None:
        output = drafter.draft(frontier)
        blocks.append(frontier.parents.shape[0])
        frontier = builder.grow(output)
        if frontier is not None and not controller.keep_going(len(blocks), output):
            break
    return builder.finish(), tuple(blocks)


def right(tree: TokenTree, truth: Sequence[int]) -> int:
    """Length of the longest path that is the beginning of ``truth``."""
    depth = {0: 0}
    nodes = zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
    for node, (token, parent) in enumerate(nodes):
        above = depth.get(parent)
        if above is not None and above < len(truth) and truth[above] == token:
            depth[node] = above + 1
    return max(depth.values())
