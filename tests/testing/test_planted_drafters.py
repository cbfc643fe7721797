"""Every promise of a drafter, broken by one that breaks it alone, is found by the check."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from falcon_lab.drafters.self_drafting import SelfDrafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    Acceptance,
    BuildContext,
    Drafter,
    DrafterInputs,
    DraftOutput,
    DraftTokens,
    FirstWeights,
    Frontier,
    LayerPlan,
    Observation,
    Prediction,
    TargetLayers,
)
from falcon_lab.testing import ContractError, check_drafter
from falcon_lab.tree import AuxiliaryNodes, TokenTree
from generated import modules

package, module = modules("drafter")
WIDTH = 24
GRU: Any = module.Head


class Mine(GRU):
    """The generated head, which keeps all promises."""

    def __init__(self, context: Any) -> None:
        super().__init__(package.HeadConfig(width=WIDTH), context)


def changed(**parts: Callable[[Prediction], Any]) -> Callable[[Any], Any]:
    """A head whose predictions are given out with other parts."""

    class Changed(Mine):
        def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
            found: Prediction = super().forward(inputs, reveal)
            return replace(found, **{name: change(found) for name, change in parts.items()})

    return Changed


def saying(change: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    """A head whose drafts are given out otherwise."""

    class Saying(Mine):
        def draft(self, frontier: Frontier) -> DraftOutput:
            found = change(super().draft(frontier).logits)
            return found if isinstance(found, DraftOutput) else DraftOutput(found)

    return Saying


class Leaking(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        return super().forward(replace(inputs, features=inputs.features.roll(-1, 1)))


class LeakingTokens(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        return super().forward(replace(inputs, tokens=inputs.tokens.roll(-1, 1)))


class NeverForgetting(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        return super().forward(replace(inputs, positions=torch.ones_like(inputs.positions)))


class MixingSequences(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        features = inputs.features
        features = features + 0.1 * (features.mean(0) - features)
        return super().forward(replace(inputs, features=features), reveal)


class Unused(Mine):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.unused = nn.Linear(3, 3)


class Detached(Mine):
    def step(self, tokens: Tensor, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        predicted, state = super().step(tokens, features, state)
        return predicted.detach(), state


class HoldingTheTarget(Mine):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.theirs = context.host.model.get_input_embeddings()


class TrainingTheTarget(Mine):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        context.host.model.get_output_embeddings().requires_grad_(True)


class NotAGradient(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        found = super().forward(inputs, reveal)
        assert found.features is not None
        root = (found.features - found.features.detach()).sum(-1, keepdim=True).abs().sqrt()
        return replace(found, features=found.features + root)


class Random(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        found = super().forward(inputs, reveal)
        assert found.features is not None
        return replace(found, features=found.features + 0.1 * torch.randn(found.features.shape))


class SeeingUnshown(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        if reveal is not None and reveal.mask.any():
            inputs = replace(inputs, tokens=reveal.tokens)
        return super().forward(inputs)


class SeeingTooMuch(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        if reveal is not None:
            inputs = replace(inputs, tokens=reveal.tokens)
        return super().forward(inputs)


class Otherwise(Mine):
    """Drafts otherwise than it was trained."""

    @torch.no_grad()
    def observe(self, observation: Observation) -> None:
        assert observation.features is not None
        super().observe(replace(observation, features=0.9 * observation.features))


class NotTruncated(Mine):
    def draft(self, frontier: Frontier) -> DraftOutput:
        output = super().draft(frontier)
        self.known = self.known[0], self.drafted[1][:1]
        return output


class Remembering(Mine):
    def reset(self, first: Tensor) -> None:
        if not hasattr(self, "known"):
            super().reset(first)


class LastPartAlone(Mine):
    def observe(self, observation: Observation) -> None:
        if not observation.remaining:
            super().observe(observation)


class LastTokenAlone(Mine):
    """Begins anew with every observation."""

    def observe(self, observation: Observation) -> None:
        if not observation.remaining and not getattr(self, "reading", False):
            self.reset(observation.tokens[0])
        self.reading = bool(observation.remaining)
        super().observe(observation)


class MixingBranches(Mine):
    def draft(self, frontier: Frontier) -> DraftOutput:
        output = super().draft(frontier)
        return DraftOutput(output.logits + 0.1 * output.logits.mean(0))


class Overwriting(Mine):
    def draft(self, frontier: Frontier) -> DraftOutput:
        output = super().draft(frontier)
        frontier.tokens.fill_(1)
        return output


class OverwritingFeatures(Mine):
    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        assert observation.features is not None
        observation.features.mul_(2)


class ChangingTheTarget(Mine):
    def draft(self, frontier: Frontier) -> DraftOutput:
        self.host.model.get_output_embeddings().weight.mul_(1.01)
        return super().draft(frontier)


class Guessing(Mine):
    def draft(self, frontier: Frontier) -> DraftOutput:
        logits = super().draft(frontier).logits
        return DraftOutput(logits + 0.1 * torch.randn(logits.shape))


class NotSaved(Mine):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.learnt = torch.rand(WIDTH)

    def step(self, tokens: Tensor, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return super().step(tokens, features, state + self.learnt)


class Shared(Mine):
    """Keeps a text's state where all copies of a batch find it."""

    texts: ClassVar[dict[str, Any]] = {}

    @property
    def known(self) -> Any:
        return self.texts["known"]

    @known.setter
    def known(self, state: Any) -> None:
        self.texts["known"] = state


class Shrinking(Mine):
    def kv_bytes(self, positions: int, tree: Any) -> int:
        return 100 - positions

    def reserve(self, positions: int, tree: Any) -> None:
        pass


class Short(Mine):
    """Breaks down at the end of a long text."""

    def reset(self, first: Tensor) -> None:
        super().reset(first)
        self.room = [0] * 40

    def observe(self, observation: Observation) -> None:
        for _ in observation.tokens:
            self.room.pop()
        super().observe(observation)


class Miscompiled(Mine):
    """Says something else once it is compiled."""

    is_compiled = False

    def compiled(self, announce: Any, compiler: Any = None, recorder: Any = None) -> Any:
        other = copy.copy(self)
        other.is_compiled = True
        return other

    def prepare(self, longest: int) -> None:
        pass

    def draft(self, frontier: Frontier) -> DraftOutput:
        found = super().draft(frontier)
        return DraftOutput(found.logits + self.is_compiled * found.logits.sin())


class Narrow(Mine):
    """Keeps all promises with a draft vocabulary."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.draft_vocabulary = context.draft_vocabulary(7)

    def draft(self, frontier: Frontier) -> DraftOutput:
        super().draft(frontier)
        words = self.draft_vocabulary
        return DraftOutput(words.head(self.drafted[0])[:, None], vocabulary=words)


class OfOtherTokens(Narrow):
    """Says of other tokens than its own that it has drafted them."""

    def draft(self, frontier: Frontier) -> DraftOutput:
        other = BuildContext(self.host).draft_vocabulary(7)
        return replace(super().draft(frontier), vocabulary=other)


class OfOtherRows(Narrow):
    """Has the rows of other tokens than it drafts."""

    def draft(self, frontier: Frontier) -> DraftOutput:
        output = super().draft(frontier)
        return replace(output, logits=output.logits.roll(1, -1))


class FirstParent(Mine):
    """Continues every branch from the first one of the pass before."""

    def draft(self, frontier: Frontier) -> DraftOutput:
        return super().draft(replace(frontier, parents=frontier.parents.clamp(max=0)))


class Attending(nn.Module, Drafter):
    """One layer of attention over pairs of token and feature, which keeps all promises.

    It counts positions, so that distances in drafting may be other ones than in training, and has
    no ``unroll`` that would be compared with drafting.
    """

    block = 1
    needs = frozenset({"features"})

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.host = context.host
        pair = 2 * self.host.hidden_size
        self.query, self.key, self.value = (nn.Linear(pair, WIDTH) for _ in range(3))
        self.key.bias.requires_grad_(False)  # adds the same to all scores of a row
        self.out = nn.Linear(WIDTH, self.host.hidden_size)
        self.near = nn.Parameter(torch.randn(8))  # for each distance; the last for all beyond

    def predict(self, tokens: Tensor, features: Tensor, places: Tensor, sees: Tensor) -> Tensor:
        rows = torch.cat((self.host.embed(tokens), features), -1)
        apart = (places.unsqueeze(-1) - places.unsqueeze(-2)).clamp(0, len(self.near) - 1)
        scores = self.query(rows) @ self.key(rows).transpose(-1, -2) / WIDTH + self.near[apart]
        mixed = scores.masked_fill(~sees, -torch.inf).softmax(-1) @ self.value(rows)
        return features + self.out(mixed)

    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        number, row = inputs.documents, torch.arange(inputs.tokens.shape[1])
        sees = (number.unsqueeze(2) == number.unsqueeze(1)) & (row[:, None] >= row)
        if reveal is not None:
            raise FalconLabError("it takes no glances")
        found = self.predict(inputs.tokens, inputs.features, inputs.positions, sees)
        row = row.expand_as(inputs.tokens)
        return Prediction(found, None, row + 1, row, 0 * row, row)

    def reset(self, first: Tensor) -> None:
        self.known = (first.new_empty(0), torch.empty(0, self.host.hidden_size))

    def observe(self, observation: Observation) -> None:
        new = observation.tokens, observation.features
        self.known = tuple(map(torch.cat, zip(self.known, new, strict=True)))

    def place(self, passes: int) -> int:
        """Where the blocks of a pass stand, behind the committed tokens."""
        return len(self.known[0]) - 1 + passes

    def place_of_text(self) -> Tensor:
        return torch.arange(len(self.known[0]))

    def ancestors(self, before: Tensor, parents: Tensor) -> Tensor:
        """What the blocks of a pass attend to, ``[F, nodes]``, of the passes before it."""
        return before[parents]

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        count = len(self.known[0])
        if frontier.tokens.shape[1] == 0:
            self.passes, text = 0, torch.ones(count, count).tril().bool()
            self.nodes = (*self.known, self.place_of_text(), text)
            self.latest = slice(count - 1, count)
        else:
            self.passes += 1
            self.nodes = self.with_blocks(frontier)
            self.latest = slice(-len(frontier.parents), None)
        self.drafted = self.predict(*self.nodes)[self.latest]
        return DraftOutput(self.host.head(self.drafted)[:, None])

    def with_blocks(self, frontier: Frontier) -> tuple[Tensor, ...]:
        """The nodes so far and those of another pass: tokens, features, places, who sees whom."""
        parents, (tokens, features, places, sees) = frontier.parents, self.nodes
        new, seen = len(parents), self.ancestors(sees[self.latest], parents)
        sees = torch.cat((sees, sees.new_zeros(len(sees), new)), 1)
        return (
            torch.cat((tokens, frontier.tokens[:, 0])),
            torch.cat((features, self.drafted[parents])),
            torch.cat((places, places.new_full((new,), self.place(self.passes)))),
            torch.cat((sees, torch.cat((seen, torch.eye(new).bool()), 1))),
        )


class Ahead(Attending):
    """Counts one position too many in later passes."""

    def place(self, passes: int) -> int:
        return super().place(passes) + 1


class Standing(Attending):
    """Counts no further after the second pass."""

    def place(self, passes: int) -> int:
        return super().place(min(passes, 1))


class Offset(Attending):
    """Counts what it observes from 1, and what it drafts from 0."""

    def place_of_text(self) -> Tensor:
        return super().place_of_text() + 1


class AmongOthers(Attending):
    """Attends to all nodes of the passes before."""

    def ancestors(self, before: Tensor, parents: Tensor) -> Tensor:
        return before.any(0).expand(len(parents), -1)


class OfAnother(Attending):
    """Attends to the ancestors of the blocks of the pass before in their order, not by parents."""

    def ancestors(self, before: Tensor, parents: Tensor) -> Tensor:
        return before[torch.arange(len(parents)) % len(before)]


class OnePass(Mine):
    """Keeps all promises, and has nothing to say to a second pass."""

    max_passes = 1

    def draft(self, frontier: Frontier) -> DraftOutput:
        if frontier.tokens.shape[1]:
            raise IndexError("a second pass")
        return super().draft(frontier)


class Sequential(nn.Module, Drafter):
    """Keeps all promises with a head for each of three passes, which ``unroll`` trains."""

    block, max_passes = 1, 3
    needs = frozenset({"features"})

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.host = context.host
        width = self.host.hidden_size
        self.heads = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))

    def predict(self, number: int, tokens: Tensor, features: Tensor) -> Tensor:
        pairs = torch.cat((self.host.embed(tokens), features), -1)
        return features + self.heads[number](pairs).tanh()

    def unroll(self, inputs: DrafterInputs, reveal: Any = None) -> Iterator[Prediction]:
        if reveal is not None:
            raise FalconLabError("it takes no glances")
        row = torch.arange(inputs.tokens.shape[1]).expand_as(inputs.tokens)
        found = inputs.features
        for number in range(len(self.heads)):
            tokens = inputs.tokens.roll(-number, 1)
            found = self.predict(number, tokens, found)
            label = (row + number + 1).where(row + number < row.shape[1], -1)
            yield Prediction(found, None, label, row, 0 * row, row)

    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        return next(self.unroll(inputs, reveal))

    def reset(self, first: Tensor) -> None:
        pass

    def observe(self, observation: Observation) -> None:
        assert observation.features is not None
        self.newest = observation.tokens[-1:], observation.features[-1:]

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        if frontier.tokens.shape[1] == 0:
            self.passes, given = 0, self.newest
        else:
            self.passes += 1
            given = frontier.tokens[:, 0], self.drafted[frontier.parents]
        self.drafted = self.predict(self.passes, *given)
        return DraftOutput(self.host.head(self.drafted)[:, None])


class Probing(nn.Module, Drafter):
    """Keeps all promises; drafts what the target says at a mask token beside the tree, corrected.

    It has nothing to draft before a round has read the mask.
    """

    block, max_passes, max_auxiliary, taps = 1, 1, 1, (0,)
    needs: frozenset[str] = frozenset()
    mask = torch.tensor([1])

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.host = context.host
        self.bias = nn.Parameter(torch.zeros(self.host.vocab_size))

    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        if reveal is not None:
            raise FalconLabError("it takes no glances")
        assert inputs.taps is not None
        row = torch.arange(inputs.tokens.shape[1])
        said = []
        for embedded, place in zip(inputs.taps[:, :, 0], inputs.positions, strict=True):
            # Row t reads its document up to t and the mask; what is behind that, nobody sees.
            column = (row - place)[:, None] + torch.arange(len(row) + 1)
            texts = embedded[column.clamp(max=len(row) - 1)]
            texts[row, place + 1] = self.host.embed(self.mask)
            hidden = self.host.model.model(inputs_embeds=texts).last_hidden_state
            said.append(self.host.head(hidden[row, place + 1]) + self.bias)
        row = row.expand_as(inputs.tokens)
        return Prediction(None, torch.stack(said), row + 1, row, 0 * row, row)

    def reset(self, first: Tensor) -> None:
        self.said = self.read = torch.empty(0, self.host.vocab_size)

    def auxiliary_nodes(self, tree: TokenTree, max_depth: int) -> AuxiliaryNodes | None:
        sees = torch.zeros(1, tree.nodes + 1, dtype=torch.bool)
        sees[0, [0, -1]] = True
        return AuxiliaryNodes(self.mask, self.mask, sees) if max_depth else None

    def observe_auxiliary(self, tree: TokenTree, logits: Tensor, acceptance: Acceptance) -> None:
        if len(acceptance.path) == 1:  # else the mask's place is one of the text
            self.read = logits[-1:]

    def observe(self, observation: Observation) -> None:
        self.said, self.read = self.read, self.read[:0]

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        return DraftOutput((self.said + self.bias)[None])


class ProbingElsewhere(Probing):
    """Has the mask read in another place than it was trained for."""

    def auxiliary_nodes(self, tree: TokenTree, max_depth: int) -> AuxiliaryNodes | None:
        found = super().auxiliary_nodes(tree, max_depth)
        return None if found is None else replace(found, depth=0 * found.depth)


class Exit(SelfDrafter):
    """Drafts with the first of two layers, which verification leaves out."""

    plan = LayerPlan(last=1)  # type: ignore[assignment]
    lower_layers = 1

    def __init__(self, context: Any) -> None:
        super().__init__(context.host)


class Through:
    """The target's layers, by a drafter that says something else of its draft tokens."""

    def __init__(self, layers: TargetLayers, change: Callable[[DraftTokens], DraftTokens]) -> None:
        self._layers, self._change = layers, change

    def run(self, drafts: Mapping[int, DraftTokens], plan: LayerPlan) -> dict[int, Tensor]:
        return self._layers.run({at: self._change(one) for at, one in drafts.items()}, plan)


def appending(change: Callable[[DraftTokens], DraftTokens]) -> Callable[[Any], Any]:
    """An exit whose draft tokens are given out otherwise."""

    class Appending(Exit):
        def attach(self, layers: TargetLayers) -> None:
            super().attach(Through(layers, change))

    return Appending


def mask_of(drafts: DraftTokens) -> Tensor:
    """What draft tokens attend to: in a chain everything."""
    if drafts.mask is not None:
        return drafts.mask.clone()
    count = len(drafts.tokens)
    return torch.ones(count, int(drafts.depth[0]) + count, dtype=torch.bool)


def of_an_earlier_round(drafts: DraftTokens) -> DraftTokens:
    """As if two draft tokens of the round before were still there, and seen."""
    mask = mask_of(drafts)
    return replace(drafts, mask=torch.cat((mask.new_ones(len(mask), 2), mask), 1))


def without_the_root(drafts: DraftTokens) -> DraftTokens:
    """As if draft tokens from the second on did not attend to the root."""
    mask = mask_of(drafts)
    mask[:, 0] &= drafts.depth < 2
    return replace(drafts, mask=mask)


class Leaving(Exit):
    """Runs the layers over what it observes, too."""

    def attach(self, layers: TargetLayers) -> None:
        self.theirs = layers
        super().attach(layers)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        newest = observation.tokens[-1:]
        self.theirs.run({0: DraftTokens(newest, torch.zeros_like(newest))}, self.plan)


class WithoutKeys(Exit):
    plan = LayerPlan(last=1, skip_attention=frozenset({0}))  # type: ignore[assignment]


class MeanFeature(FirstWeights):
    """A head's outputs begin at the mean of the target's features."""

    def __init__(self, head: Any) -> None:
        self.head, self.sums, self.count = head, torch.zeros(()), 0

    def add(self, inputs: DrafterInputs, features: Tensor) -> None:
        self.sums = self.sums + features.flatten(0, 1).sum(0)
        self.count += features[..., 0].numel()

    def assign(self) -> int:
        if self.count:
            self.set_to(self.sums / self.count)
        return self.count

    def set_to(self, mean: Tensor) -> None:
        with torch.no_grad():
            self.head.out.bias.copy_(mean)


def beginning(kind: Callable[[Any], FirstWeights]) -> Callable[[Any], Any]:
    """A head whose training begins with weights of a kind."""

    class Beginning(Mine):
        def first_weights(self) -> FirstWeights:
            return kind(self)

    return Beginning


class OfTheLastBatch(MeanFeature):
    def add(self, inputs: DrafterInputs, features: Tensor) -> None:
        self.sums, self.count = torch.zeros(()), 0
        super().add(inputs, features)


class OfNoDocument(MeanFeature):
    def assign(self) -> int:
        if not self.count:
            self.set_to(torch.zeros(()))
        return super().assign()


class LeavingWeights(MeanFeature):
    def set_to(self, mean: Tensor) -> None:
        pass


class NoNumbers(MeanFeature):
    def set_to(self, mean: Tensor) -> None:
        super().set_to(mean / torch.zeros(()))


class WithoutBlock(Mine):
    block = 0


class NeedingMore(Mine):
    needs = frozenset({"features", "hidden"})


class NoPasses(Mine):
    max_passes = 0


BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a block of nothing": (WithoutBlock, "block=0"),
    "needs that nobody knows": (NeedingMore, "needs: expected frozenset"),
    "no passes": (NoPasses, "max_passes: expected None"),
    "no drafter": (lambda context: nn.Linear(1, 1), "without draft, observe, reset, block, needs"),
    "a vocabulary too small": (saying(lambda rows: rows[..., 1:]), r"logits in pass 1.*12\]"),
    "a draft vocabulary of other tokens": (OfOtherTokens, "DraftOutput.vocabulary in pass 1"),
    "a draft vocabulary with other rows": (OfOtherRows, "drafted and trained"),
    "too many rows": (saying(lambda rows: rows.repeat(1, 2, 1)), "at most 1"),
    "nan": (saying(lambda rows: rows / 0), "found nan or inf"),
    "a false promise": (
        saying(
            lambda rows: DraftOutput(
                rows.masked_fill(rows > rows.mean(), -torch.inf), all_proposed=True
            )
        ),
        "all_proposed",
    ),
    "features of other rows": (
        saying(lambda rows: DraftOutput(rows, rows[:, :0])),
        "DraftOutput.features",
    ),
    "a frontier that is overwritten": (Overwriting, "the frontier changed in place"),
    "an observation that is overwritten": (OverwritingFeatures, "the observation changed"),
    "a target that is changed": (ChangingTheTarget, "the target's weights changed"),
    "drafts at random": (Guessing, "drafted again"),
    "a cache that is not truncated": (NotTruncated, "rounds that drafted other tokens"),
    "parts of a prompt that are dropped": (LastPartAlone, "a prompt in parts"),
    "tokens of earlier rounds that are dropped": (LastTokenAlone, "tokens in as many rounds"),
    "a text that is remembered": (Remembering, "a second text"),
    "branches that mix": (MixingBranches, "a frontier of several"),
    "branches of another parent": (FirstParent, r"a frontier of several \(pass [34]\)"),
    "blocks that see other branches": (AmongOthers, r"a frontier of several \(pass 3\)"),
    "ancestors of another branch": (OfAnother, r"a frontier of several \(pass 3\)"),
    "later passes that stand too far": (Ahead, "in pass 2 of a round, drafted and trained"),
    "later passes that stand still": (Standing, "in pass 3 of a round, drafted and trained"),
    "observed tokens that stand elsewhere": (Offset, "in pass 2 of a round, drafted and trained"),
    "draft tokens of an earlier round": (
        appending(of_an_earlier_round),
        r"shape of DraftTokens.mask in pass 1 .* \[1, 1\], found \[1, 3\]",
    ),
    "draft tokens that stand one too far": (
        appending(lambda drafts: replace(drafts, depth=drafts.depth + 1)),
        "DraftTokens.depth in pass 1 .* expected 0",
    ),
    "another token than the newest": (
        appending(
            lambda drafts: replace(drafts, tokens=(drafts.tokens + (drafts.depth == 0)) % 12)
        ),
        "a token at depth 0",
    ),
    "draft tokens that are left behind": (Leaving, "outside of a round: expected none"),
    "states of another path": (appending(without_the_root), "goes on where its passes have ended"),
    "lower layers without keys": (WithoutKeys, r"lower_layers=1 have read: expected some"),
    "memory that falls": (Shrinking, "kv_bytes"),
    "passes that are compiled wrong": (Miscompiled, "drafts through compiled passes"),
    "labels one too far": (changed(label=lambda p: p.label + 1), "Prediction.label"),
    "sources one too old": (changed(source=lambda p: p.source - 1), "Prediction.label"),
    "slots that do not exist": (changed(slot=lambda p: p.slot + 1), "Prediction.slot"),
    "one group for all": (changed(group=lambda p: 0 * p.group), "Prediction.group"),
    "no labels": (changed(label=lambda p: 0 * p.label - 1), "rows that count"),
    "no prediction": (changed(features=lambda p: None), "Prediction: expected features"),
    "rows of another shape": (changed(slot=lambda p: p.slot[:, 1:]), "shape of Prediction.slot"),
    "numbers from nowhere": (Random, "one state of the generator"),
    "an unused weight": (Unused, "no gradient for unused.weight, unused.bias"),
    "predictions that are detached": (Detached, "a number with a gradient"),
    "the target's weights as its own": (HoldingTheTarget, "the target's as theirs.weight"),
    "a target that is trained": (TrainingTheTarget, "the frozen target"),
    "gradients that are none": (NotAGradient, "nan or inf for"),
    "labels that leak": (Leaking, "when newer inputs change"),
    "tokens that leak": (LeakingTokens, "when newer inputs change"),
    "documents that are not separate": (NeverForgetting, "packed among others"),
    "sequences that are not separate": (MixingSequences, "a batch of three"),
    "first weights of the last batch": (beginning(OfTheLastBatch), "come in two batches"),
    "first weights of no document": (beginning(OfNoDocument), "rest on no document"),
    "first weights that are not set": (beginning(LeavingWeights), "0 tensors that have changed"),
    "first weights that are no numbers": (beginning(NoNumbers), "nan or inf in out.bias"),
    "labels that are not shown": (SeeingUnshown, "labels that it does not show"),
    "a glance at nothing that shows": (SeeingTooMuch, "a glance that shows nothing"),
    "drafting that is not training": (Otherwise, "drafted and trained"),
    "auxiliary nodes that stand elsewhere": (ProbingElsewhere, "drafted and trained"),
    "something learnt that is not saved": (NotSaved, "saved and loaded"),
    "a state that copies share": (Shared, "a sequence of a batch"),
}


@pytest.mark.parametrize("defect", BROKEN)
def test_a_planted_defect_is_found_and_named(defect: str) -> None:
    build, said = BROKEN[defect]
    with pytest.raises(ContractError, match=said) as caught:
        check_drafter(build)
    assert "; " in str(caught.value)  # what to do about it


HEADS = [Mine, Attending, OnePass, Sequential, Probing, Exit, beginning(MeanFeature)]


@pytest.mark.parametrize("head", HEADS)
def test_a_head_without_a_defect_passes(head: Callable[[Any], Any]) -> None:
    check_drafter(head)


def test_what_the_drafter_itself_raises_says_what_was_being_checked() -> None:
    with pytest.raises(IndexError) as caught:
        check_drafter(Short)
    assert any("greedy text" in note for note in caught.value.__notes__)


def test_the_official_code_s_lstm_is_found_out() -> None:
    node = {"name": "falcon", "fuse": "lstm_positionwise"}  # no recurrence, so nothing to learn
    with pytest.raises(ContractError, match=r"no gradient for fuse\.mix\.weight_hh_l0"):
        check_drafter(node)


def test_every_check_has_a_defect_of_its_own() -> None:
    from falcon_lab.testing import (
        drafter_passes,
        drafter_rows,
        drafter_training,
        drafters,
        shared_layers,
    )

    parts = (drafter_passes, drafter_rows, drafter_training, drafters, shared_layers)
    checks = [each.CHECKS for each in parts]
    assert len(BROKEN) > len([*itertools.chain(*checks)])
