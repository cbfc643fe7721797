"""The check of a drafter, and those of its parts that decode with it."""

from __future__ import annotations

from itertools import product
from typing import Any

from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.interfaces import is_trainable
from falcon_lab.testing import drafter_passes, drafter_rows, drafter_training, shared_layers
from falcon_lab.testing.decoding import (
    PROMPTS,
    TREES,
    expect_greedy,
    expect_same,
    expect_sampled,
    expect_whole,
    write,
    write_together,
)
from falcon_lab.testing.drafter_case import Case, DraftedSequence
from falcon_lab.testing.targets import tiny_target
from falcon_lab.testing.tested import ComponentUnderTest, Recipe

VOCABULARY, POSITIONS = 12, 48


def check_drafter(drafter: Recipe, *, family: str = "llama", seed: int = 0) -> None:
    """Check that a drafter does what its kind requires, on a tiny random target.

    - It is a ``Drafter``, its passes have the shapes of ``DraftOutput``, and it changes nothing
      that it is given.
    - Drafting does not depend on how its state came about: what was drafted leaves no trace, a
      prompt in parts is the whole prompt, tokens observed in several rounds are tokens observed at
      once, a tree's branch is a chain in every pass, and ``reset`` leaves nothing behind.
    - One whose passes can be compiled drafts the same through compiled passes and through graphs,
      which stand-ins take the place of (``testing/compiling.py``).
    - One that runs the target's layers: it does so in its rounds alone, over draft tokens of this
      round at their positions, and where it declares ``lower_layers``, verification that goes on
      from there gives what the whole pass gives.
    - One with weights: every weight gets a gradient and the target none; a row's prediction does
      not depend on inputs newer than its ``source``; packed documents are separate ones and B
      sequences are B times one; glances show what they say; what training predicts is what
      drafting predicts, in every pass of its ``unroll`` or, without one, where training reads
      the features that the pass before predicted; saved and loaded it is the same. The weights that
      a solution of its own begins with are numbers, and those of its documents in any batches.
    - With every built-in tree, greedy output is the target's token for token, and sampled output
      follows the target's distribution, at the edges too: a prompt of one token, an end inside a
      draft, budgets of nothing, the target's last position, and sequences of a batch.

    Args:
        drafter: a YAML node, or what builds a drafter from a ``BuildContext``.
        family: of the target: a name among ``falcon_lab.testing.targets.FAMILIES``.
        seed: of everything random.

    Raises:
        ContractError: it does not.
    """
    tested = ComponentUnderTest("drafter", drafter, seed)
    target = tiny_target(family, vocab=VOCABULARY, positions=POSITIONS)
    case = Case(tested, target)
    with tested.checking("that it is a drafter"):
        drafter_passes.check_declarations(case)
        made = case.fresh()
    trained = [*drafter_training.CHECKS, *drafter_rows.CHECKS] if is_trainable(made) else []
    for what, check in [*drafter_passes.CHECKS, *shared_layers.CHECKS, *trained, *CHECKS]:
        with tested.checking(what):
            check(case)


LIMITS: dict[str, dict[str, Any]] = {
    "no depth": {"depth": 0},
    "no nodes": {"nodes": 0},
    "one node": {"nodes": 1},
    "no passes": {"passes": 0},
    "one pass": {"passes": 1},
}


# --- a drafter ----------------------------------------------------------------------------------


def trees_for(case: Case) -> dict[str, dict[str, Any]]:
    """Return ``TREES`` and, for a drafter that has whole paths, the tree that is made of them."""
    drafter = case.fresh()
    drafted = DraftedSequence(drafter, case.text(drafter, 4))
    drafted.observe(4)
    if drafter.drafters or drafted.draft().paths is None:
        return TREES
    return TREES | {"a tree of paths": {"name": "paths"}}


def check_greedy(case: Case) -> None:
    """Check greedy text token for token, with every built-in tree that it can grow."""
    for name, tree in trees_for(case).items():
        made = case.engine(case.fresh(), tree=tree)
        expect_greedy(case.tested, case.target, made, name)
    expect_whole(case.tested, case.target, made, name)


def check_budgets(case: Case) -> None:
    """Check rounds that may spend nothing, or little."""
    shapes = ("a static tree", "a dynamic tree")
    for (name, limit), shape in product(LIMITS.items(), shapes):
        controller = {"name": "fixed", **limit}
        tree = TREES[shape]
        made = case.engine(case.fresh(), tree=tree, controller=controller)
        ours, plain = (write(each, PROMPTS[2], 8) for each in (made, PlainEngine(case.target)))
        what = f"{case.tested}: greedy text with {shape} and a budget of {name}"
        expect_same(what, ours, plain)


def check_chunks(case: Case) -> None:
    """Check that a prompt which is read in chunks gives the same drafts."""
    rounds = []
    for chunk in (3, 100):
        drafted: list[list[int]] = []

        def keep(*given: Any, drafted: list[list[int]] = drafted) -> None:
            if (tree := given[2]) is not None:
                drafted.append(tree.tokens.tolist())

        made = case.engine(case.fresh(), chunk=chunk)
        write(made, PROMPTS[2], on_round=keep)
        rounds.append(drafted)
    case.tested.expect(
        rounds[0] == rounds[1],
        "drafts after a prompt that was read in chunks of 3 tokens",
        expected=rounds[1],
        found=rounds[0],
        fix="take in every observation of a prompt, whatever its remaining says",
    )


def check_seeds(case: Case) -> None:
    """Check that with chosen candidates a seed gives the text that plain decoding gives."""
    for seed, (name, tree) in product(range(2), TREES.items()):
        made = case.engine(case.fresh(), tree=tree)
        ours, plain = (
            write(each, PROMPTS[1], 12, generator=case.tested.generator(51 + seed), temperature=1.0)
            for each in (made, PlainEngine(case.target))
        )
        expect_same(
            f"{case.tested}: the text of a seed at temperature 1 with {name}",
            ours,
            plain,
            "a drafter draws nothing from the generator of decoding",
        )


def check_sampled(case: Case) -> None:
    """Check that with drawn candidates the text follows the target's distribution."""
    tree = {"name": "chain", "depth": 3, "proposal": "sampled"}
    made = case.engine(case.fresh(), tree=tree)
    expect_sampled(case.tested, case.target, made, "a sampled chain")


def check_batches(case: Case) -> None:
    """Check that a sequence of a batch is drafted for as if it were alone."""
    made = case.engine(case.fresh(), tree=TREES["a static tree"])
    together = write_together(made, PROMPTS, 12)
    for prompt, ours in zip(PROMPTS, together, strict=True):
        expected = write(made, prompt, 12)
        case.tested.expect(
            ours.tokens == expected.tokens and ours.rounds == expected.rounds,
            "a sequence of a batch of two",
            expected=f"{expected.tokens}, accepted {[r.accepted for r in expected.rounds]}",
            found=f"{ours.tokens}, accepted {[r.accepted for r in ours.rounds]}",
            fix="decoding copies a drafter for every sequence: store the state of a text in "
            "attributes that copy.deepcopy copies, never in the class or the module",
        )


CHECKS: list[tuple[str, Any]] = [
    ("that greedy text is the target's", check_greedy),
    ("that budgets are no matter", check_budgets),
    ("that prompts may be read in chunks", check_chunks),
    ("that a seed's text is the target's", check_seeds),
    ("that sampled text follows the target", check_sampled),
    ("that sequences of a batch are separate", check_batches),
]
