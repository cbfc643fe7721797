"""Decoding with a component on a tiny target: the target's own text, whatever is drafted."""

from __future__ import annotations

from itertools import product
from typing import Any

from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.model.target import Target
from falcon_lab.testing.conversation import Case, Conversation
from falcon_lab.testing.decoding import TREES, expect_same, fit, write, write_together
from falcon_lab.testing.statistics import UNLIKELY
from falcon_lab.testing.subject import Subject

PROMPTS = ([5], [7, 9, 3], [2, 8, 2, 8, 2, 4, 11, 6, 2, 8])
"""One token, a few, and one with something to copy."""

LIMITS: dict[str, dict[str, Any]] = {
    "no depth": {"depth": 0},
    "no nodes": {"nodes": 0},
    "one node": {"nodes": 1},
    "no passes": {"passes": 0},
    "one pass": {"passes": 1},
}
SAMPLES = 100


def expect_greedy(subject: Subject, target: Target, made: SpeculativeEngine, what: str) -> None:
    """Greedy text of every prompt, and texts that end inside a draft."""
    plain = PlainEngine(target)
    for prompt in PROMPTS:
        expected = write(plain, prompt)
        expect_same(f"{subject}: greedy text with {what}", write(made, prompt), expected)
    places = {token: place for place, token in reversed([*enumerate(expected.tokens)])}
    for end in sorted(places, key=lambda token: -places[token])[:2]:
        expect_same(
            f"{subject}: greedy text with {what}, ended by token {end}",
            write(made, prompt, ends=[end]),
            write(plain, prompt, ends=[end]),
        )


def expect_whole(subject: Subject, target: Target, made: SpeculativeEngine, what: str) -> None:
    """Greedy text up to the last position of the target's context."""
    ours, plain = (
        write(each, PROMPTS[1], target.max_positions) for each in (made, PlainEngine(target))
    )
    what = f"{subject}: greedy text with {what}, to the target's last position"
    expect_same(what, ours, plain)


def expect_sampled(subject: Subject, target: Target, made: SpeculativeEngine, what: str) -> None:
    """Sampled texts of three tokens follow the target's joint distribution."""
    # In every family at least CELLS of the 27 texts are common then.
    sampling: dict[str, Any] = {"temperature": 2.0, "top_k": 3}
    generator = subject.generator(50)
    chance = fit(made, PROMPTS[1], samples=SAMPLES, generator=generator, **sampling)
    subject.expect(
        chance > UNLIKELY,
        f"the distribution of sampled text with {what}",
        expected="the target's own",
        found=f"one that is this far from it with a chance of {chance:.1g}",
        fix="speculation must not change what is likely: see docs/architecture.md, Laws",
    )


# --- a drafter ----------------------------------------------------------------------------------


def trees_for(case: Case) -> dict[str, dict[str, Any]]:
    """``TREES``, and for a drafter that finds whole paths the tree that is made of them."""
    drafter = case.fresh()
    talk = Conversation(drafter, case.text(drafter, 4))
    talk.observe(4)
    return TREES if talk.draft().paths is None else TREES | {"a tree of paths": {"name": "paths"}}


def check_greedy(case: Case) -> None:
    """Token for token, with every built-in tree that it can grow."""
    for name, tree in trees_for(case).items():
        made = case.engine(case.fresh(), tree=tree)
        expect_greedy(case.subject, case.target, made, name)
    expect_whole(case.subject, case.target, made, name)


def check_budgets(case: Case) -> None:
    """Rounds that may spend nothing, or little."""
    shapes = ("a static tree", "a dynamic tree")
    for (name, limit), shape in product(LIMITS.items(), shapes):
        controller = {"name": "fixed", **limit}
        tree = TREES[shape]
        made = case.engine(case.fresh(), tree=tree, controller=controller)
        ours, plain = (write(each, PROMPTS[2], 8) for each in (made, PlainEngine(case.target)))
        what = f"{case.subject}: greedy text with {shape} and a budget of {name}"
        expect_same(what, ours, plain)


def check_chunks(case: Case) -> None:
    """A prompt that is read in chunks gives the same drafts."""
    rounds = []
    for chunk in (3, 100):
        drafted: list[list[int]] = []

        def keep(*said: Any, drafted: list[list[int]] = drafted) -> None:
            if (tree := said[2]) is not None:
                drafted.append(tree.tokens.tolist())

        made = case.engine(case.fresh(), chunk=chunk)
        write(made, PROMPTS[2], on_round=keep)
        rounds.append(drafted)
    case.subject.expect(
        rounds[0] == rounds[1],
        "drafts after a prompt that was read in chunks of 3 tokens",
        expected=rounds[1],
        found=rounds[0],
        fix="take in every observation of a prompt, whatever its remaining says",
    )


def check_seeds(case: Case) -> None:
    """Candidates that were chosen, not drawn: a seed gives the text that it gives plainly."""
    for seed, (name, tree) in product(range(2), TREES.items()):
        made = case.engine(case.fresh(), tree=tree)
        ours, plain = (
            write(
                each, PROMPTS[1], 12, generator=case.subject.generator(51 + seed), temperature=1.0
            )
            for each in (made, PlainEngine(case.target))
        )
        expect_same(
            f"{case.subject}: the text of a seed at temperature 1 with {name}",
            ours,
            plain,
            "a drafter draws nothing from the generator of decoding",
        )


def check_sampled(case: Case) -> None:
    """Candidates that were drawn: the target's distribution."""
    tree = {"name": "chain", "depth": 3, "proposal": "sampled"}
    made = case.engine(case.fresh(), tree=tree)
    expect_sampled(case.subject, case.target, made, "a sampled chain")


def check_batches(case: Case) -> None:
    """A row of a batch is drafted for as if it were alone."""
    made = case.engine(case.fresh(), tree=TREES["a static tree"])
    together = write_together(made, PROMPTS, 12)
    for prompt, ours in zip(PROMPTS, together, strict=True):
        expected = write(made, prompt, 12)
        case.subject.expect(
            ours.tokens == expected.tokens and ours.rounds == expected.rounds,
            "a row of a batch of two",
            expected=f"{expected.tokens}, accepted {[r.accepted for r in expected.rounds]}",
            found=f"{ours.tokens}, accepted {[r.accepted for r in ours.rounds]}",
            fix="decoding copies a drafter for every row: keep the state of a text in attributes "
            "that copy.deepcopy copies, never in the class or the module",
        )


CHECKS: list[tuple[str, Any]] = [
    ("that greedy text is the target's", check_greedy),
    ("that budgets are no matter", check_budgets),
    ("that prompts may be read in chunks", check_chunks),
    ("that a seed's text is the target's", check_seeds),
    ("that sampled text follows the target", check_sampled),
    ("that rows of a batch are separate", check_batches),
]
