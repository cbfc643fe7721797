"""Engines on a tiny target, the texts that they decode, and whether these are the target's own.

Shapes: P prompt tokens, S samples, d tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.assembling import assemble
from falcon_lab.decoding.engine import Engine, SpeculativeEngine
from falcon_lab.decoding.generation import Generation, OnRound, Round
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.interfaces import BuildContext, Drafter
from falcon_lab.model.target import Target
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.registry import Components
from falcon_lab.sampling import Sampling
from falcon_lab.testing.reference import UNLIKELY, chi_square, common
from falcon_lab.testing.targets import one_document
from falcon_lab.testing.tested import ComponentUnderTest, expect

BRANCHED = {"": 3, "0": 2, "1": 1, "00": 2, "000": 1, "001": 1}
TREES: dict[str, dict[str, Any]] = {
    "a chain": {"name": "chain", "depth": 5, "proposal": "deterministic"},
    "a static tree": {"name": "static", "template": BRANCHED, "proposal": "deterministic"},
    "a dynamic tree": {"name": "dynamic", "nodes": 8, "beam": 3, "width": 3, "depth": 4},
}
"""One of each kind, that any drafter can grow, and whose nodes are chosen at any temperature: so a
seed gives the text that plain decoding gives."""

CELLS = 4
"""Outcomes that must be common for a fit to be meaningful."""


def build_drafter(
    target: Target,
    node: Mapping[str, Any],
    *,
    components: Components | None = None,
    seed: int = 0,
    stir: float = 0.0,
) -> Any:
    """Build a drafter in evaluation mode, with the same random weights every time.

    Args:
        target: what it drafts for.
        node: its YAML node.
        components: know it; None are the installed ones.
        seed: of its weights.
        stir: the standard deviation of noise that is added to all of them. A fresh head may be
            indifferent (zero biases, layers that begin as the identity); a stirred one is not.
    """
    components = components or load_components()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = components.build("drafter", node, BuildContext(target))
    return stirred(made, stir, torch.Generator().manual_seed(seed + 1))


def stirred(drafter: Any, stir: float, generator: torch.Generator) -> Any:
    """Add noise to a drafter's weights, if it has any, and put it into evaluation mode."""
    for part in drafter.drafters:
        stirred(part, stir, generator)
    if not isinstance(drafter, torch.nn.Module):
        return drafter
    with torch.no_grad():
        for weight in drafter.parameters() if stir else ():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_((stir * noise).to(weight))
    return drafter.eval()


def engine(
    target: Target,
    drafter: Drafter,
    *,
    tree: Any = None,
    rule: Any = None,
    controller: Any = None,
    components: Components | None = None,
    chunk: int | None = None,
) -> SpeculativeEngine:
    """Make an engine of a drafter.

    Args:
        target: what it drafts for.
        drafter: the object.
        tree: a YAML node, which is built, or the object itself; None is a chain.
        rule: likewise; None is the one that ``auto`` chooses.
        controller: likewise; None is ``fixed``.
        components: build the nodes; None are the installed ones.
        chunk: prompt tokens of a pass.
    """
    parts = {
        "tree": tree or {"name": "chain"},
        "acceptance": rule or {"name": "auto"},
        "controller": controller or {"name": "fixed"},
    }
    decoding = None if chunk is None else DecodingConfig(prefill_chunk=chunk)
    known = components or load_components()
    return assemble(target, drafter, parts, known, decoding=decoding)


# --- texts --------------------------------------------------------------------------------------


def write(
    engine: Engine,
    prompt: Sequence[int],
    new: int = 16,
    *,
    ends: Sequence[int] = (),
    generator: torch.Generator | None = None,
    on_round: OnRound | None = None,
    **sampling: Any,
) -> Generation:
    """Decode a text, greedily unless ``sampling`` has ``temperature``, ``top_k`` or ``top_p``.

    Args:
        engine: decodes them.
        prompt: P tokens.
        new: most tokens that follow.
        ends: tokens that end it.
        generator: of what is drawn; None is the same every time.
        on_round: called after every round.
        sampling: of ``Sampling``.
    """
    device = engine.target.device
    return engine.generate(
        torch.tensor(prompt, device=device),
        max_new_tokens=new,
        sampling=Sampling(**sampling),
        generator=generator or torch.Generator(device).manual_seed(0),
        stop=StopCondition(ends),
        on_round=on_round,
    )


def rounds_of(
    target: Target, drafter: Drafter, components: Components, prompt: Sequence[int] = (1, 2, 3)
) -> list[list[int]]:
    """Return what a drafter drafts in every round of a greedy text, as a chain."""
    drafts: list[list[int]] = []

    def keep(added: Any, accepted: int, tree: Any, acceptance: Any) -> None:
        if tree is not None:
            drafts.append(tree.tokens[1:].tolist())

    write(engine(target, drafter, components=components), prompt, on_round=keep)
    return drafts


def write_together(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new: int = 16,
    *,
    batch_size: int = 2,
) -> list[Generation]:
    """Decode greedy texts in batches of ``batch_size``."""
    return engine.generate_batch(
        [torch.tensor(prompt) for prompt in prompts],
        batch_size=batch_size,
        max_new_tokens=new,
        sampling=Sampling(),
        generators=[torch.Generator() for _ in prompts],
        stop=StopCondition(),
    )


def plain_text(target: Target, prompt: Sequence[int], new: int = 16, **sampling: Any) -> list[int]:
    """Return the text of plain decoding."""
    return write(PlainEngine(target), prompt, new, **sampling).tokens


def lossless_rounds(
    engine: Engine, prompts: Sequence[Sequence[int]], new: int = 16, **sampling: Any
) -> list[Round]:
    """Decode texts, and return their rounds if every text is that of plain decoding.

    Check the rounds too: a drafter that never drafts anything is lossless.

    Args:
        engine: decodes them.
        prompts: P tokens each.
        new: most tokens that follow.
        sampling: of ``Sampling``; what is left out is greedy. Drawn text is the same for trees of
            chosen candidates, and only in distribution for sampled ones (see ``fit``).

    Raises:
        ContractError: a text is another one.
    """
    rounds, plain = [], PlainEngine(engine.target.plain())
    for prompt in prompts:
        ours = write(engine, prompt, new, **sampling)
        expect_same(f"the text after {list(prompt)}", ours, write(plain, prompt, new, **sampling))
        rounds += ours.rounds
    return rounds


def expect_same(what: str, ours: Generation, plain: Generation, fix: str = "") -> None:
    """Raise unless two texts are equal token for token, and end alike.

    Raises:
        ContractError: it is not.
    """
    expect(
        (ours.tokens, ours.finish) == (plain.tokens, plain.finish),
        what,
        expected=f"the target's own text {plain.tokens} ({plain.finish})",
        found=f"{ours.tokens} ({ours.finish})",
        fix=fix or "speculation must not change the text: see docs/architecture.md, Laws",
    )


def accepted(rounds: Sequence[Round]) -> int:
    """Count the draft tokens that were accepted."""
    return sum(done.accepted for done in rounds)


# --- distributions ------------------------------------------------------------------------------


def fit(
    engine: Engine,
    prompt: Sequence[int],
    *,
    samples: int,
    generator: torch.Generator,
    tokens: int = 3,
    **sampling: Any,
) -> float:
    """Return the chance that sampled texts fit the target's distribution as badly as these do.

    Args:
        engine: decodes them.
        prompt: P tokens.
        samples: S.
        generator: of all of them.
        tokens: d, first tokens of a text that are looked at, jointly. One more is written, so that
            the last of them may be a draft too.
        sampling: of ``Sampling``.

    Returns:
        A chi-square p-value. With a fixed seed, ``> 0.01`` is a test; a planted bias should give
        far less.

    Raises:
        ValueError: too few outcomes are common enough to count.
    """
    p = exact(engine.target, prompt, Sampling(**sampling), tokens)
    if (cells := int(common(p, samples).sum())) < CELLS:
        raise ValueError(
            f"only {cells} outcomes of {tokens} tokens are expected five times in {samples} "
            "samples; take more samples, a smaller vocabulary, or sampling that keeps fewer tokens"
        )
    texts = [
        write(engine, prompt, tokens + 1, generator=generator, **sampling).tokens[:tokens]
        for _ in range(samples)
    ]
    return chi_square(torch.tensor(texts), p)


def exact(target: Target, prompt: Sequence[int], sampling: Sampling, tokens: int = 3) -> Tensor:
    """Return the distribution ``[V] * d`` of the next d >= 2 tokens, from every continuation."""
    size = target.vocab_size
    after = torch.cartesian_prod(*[torch.arange(size)] * (tokens - 1)).view(-1, tokens - 1)
    texts = torch.cat((torch.tensor([prompt]).expand(len(after), -1), after), 1)
    batch = one_document(texts[0])
    documents, positions = batch.documents.expand_as(texts), batch.positions.expand_as(texts)
    logits = target.head(target.teacher(texts, documents, positions)[:, -tokens:])
    p = sampling.probabilities(logits).double().view(*[size] * (tokens - 1), tokens, size)
    joint = p.new_ones(())
    for place in range(tokens):
        rest = p.select(-2, place)
        for _ in range(tokens - 1 - place):
            rest = rest.select(place, 0)  # it does not depend on later tokens: take any of them
        joint = joint[..., None] * rest
    return joint


PROMPTS = ([5], [7, 9, 3], [2, 8, 2, 8, 2, 4, 11, 6, 2, 8])
"""One token, a few, and one with something to copy."""
SAMPLES = 100


def expect_greedy(tested: ComponentUnderTest, target: Target, made: Engine, what: str) -> None:
    """Check greedy text of every prompt, and texts that end inside a draft."""
    plain = PlainEngine(target)
    for prompt in PROMPTS:
        expected = write(plain, prompt)
        expect_same(f"{tested}: greedy text with {what}", write(made, prompt), expected)
    places = {token: place for place, token in reversed([*enumerate(expected.tokens)])}
    for end in sorted(places, key=lambda token: -places[token])[:2]:
        expect_same(
            f"{tested}: greedy text with {what}, ended by token {end}",
            write(made, prompt, ends=[end]),
            write(plain, prompt, ends=[end]),
        )


def expect_whole(tested: ComponentUnderTest, target: Target, made: Engine, what: str) -> None:
    """Check greedy text up to the last position of the target's context."""
    ours, plain = (
        write(each, PROMPTS[1], target.max_positions) for each in (made, PlainEngine(target))
    )
    what = f"{tested}: greedy text with {what}, to the target's last position"
    expect_same(what, ours, plain)


def expect_sampled(tested: ComponentUnderTest, target: Target, made: Engine, what: str) -> None:
    """Check that sampled texts of three tokens follow the target's joint distribution."""
    # In every family at least CELLS of the 27 texts are common then.
    sampling: dict[str, Any] = {"temperature": 2.0, "top_k": 3}
    generator = tested.generator(50)
    chance = fit(made, PROMPTS[1], samples=SAMPLES, generator=generator, **sampling)
    tested.expect(
        chance > UNLIKELY,
        f"the distribution of sampled text with {what}",
        expected="the target's own",
        found=f"one that is this far from it with a chance of {chance:.1g}",
        fix="speculation must not change what is likely: see docs/architecture.md, Laws",
    )
