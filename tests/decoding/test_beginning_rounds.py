"""What a round's drafter and tree builder are told when it begins, and afterwards."""

from __future__ import annotations

from typing import Any

from fakes.auxiliary import WithAuxiliary
from fakes.batches import same_texts, together
from fakes.decoding import CONTEXT, chain, generate, plain, speculative
from fakes.drafters import RandomDrafter
from fakes.remembering import RememberingDrafter
from falcon_lab.controllers import Fixed
from falcon_lab.interfaces import (
    RoundContext,
    RoundOutcome,
    TreeBuilder,
    begins_rounds,
)
from falcon_lab.plugins.builtins import FixedConfig
from falcon_lab.trees.paths import checked
from falcon_lab.trees.template_tree import TemplateTree
from tiny_models import tiny_target

TARGET = tiny_target("llama", vocab=12)


class Asking(RememberingDrafter):
    """Compares what it is told with what it has observed, and keeps the budgets."""

    def reset(self, first: Any) -> None:
        super().reset(first)
        self.budgets: list[int | None] = []
        self.drafted = self.begun = 0

    def begin_round(self, context: RoundContext) -> None:
        assert context.text(5) == self.text[-5:]
        assert context.text(999) == self.text
        assert context.text(0) == []
        assert int(context.root) == self.text[-1]
        self.begun += 1
        self.budgets.append(context.budget.depth)

    def draft(self, frontier: Any) -> Any:
        self.drafted += frontier.tokens.shape[1] == 0
        assert self.begun == self.drafted, "every round that drafts is begun once"
        return super().draft(frontier)


class AskingTree(TemplateTree):
    """Looks at the text, and at the tree that came of it."""

    def __init__(self) -> None:
        super().__init__(checked(chain(3)), 2, "deterministic")
        self.newest: list[int] = []
        self.grown: Any = None

    def start(self, context: RoundContext) -> Any:
        self.newest = context.text(2)
        assert self.newest[-1] == int(context.root)
        return super().start(context)

    def finish(self) -> Any:
        self.grown = super().finish()
        return self.grown

    def update(self, outcome: RoundOutcome) -> None:
        assert outcome.tree is not None
        assert outcome.tree.tokens.tolist() == self.grown.tokens.tolist()


def test_drafter_and_tree_builder_know_text_and_budget_of_every_round() -> None:
    drafter = Asking(12, 2, [])
    controller = Fixed(FixedConfig(depth=2), CONTEXT)
    out = generate(speculative(TARGET, drafter, AskingTree(), controller=controller), [3, 1, 4], 20)
    assert out.tokens == plain(TARGET, [3, 1, 4], 20).tokens
    assert drafter.budgets[0] == 2
    assert drafter.budgets[-1] in (1, 2), "no deeper than what is still to be written"
    assert drafter.begun == sum(round_.passes > 0 for round_ in out.rounds)


def test_every_sequence_of_a_batch_is_begun_for_itself() -> None:
    engine = speculative(TARGET, Asking(12, 2, []), AskingTree())
    same_texts(together(engine, 3), together(speculative(TARGET, RandomDrafter(12, 1), []), 1))


def test_those_that_do_not_ask_are_not_told() -> None:
    assert not begins_rounds(RandomDrafter(12, 1))
    assert begins_rounds(Asking(12, 2, []))


class TwoANode(WithAuxiliary, RandomDrafter):
    """Has at most two auxiliary nodes for every node of its tree."""

    def most_auxiliary(self, tree: TreeBuilder) -> int:
        return 2 * tree.max_nodes


def test_room_for_auxiliary_nodes_follows_the_tree() -> None:
    drafter = TwoANode(12, 1).with_nodes(6)
    small, large = (speculative(TARGET, drafter, chain(depth)) for depth in (2, 5))
    assert (small.max_nodes, large.max_nodes) == (9, 18)
    drafter.max_auxiliary = 1000
    assert small.max_nodes == 9
    drafter.max_auxiliary = 6
    assert generate(small, [3, 1], 20).tokens == plain(TARGET, [3, 1], 20).tokens
