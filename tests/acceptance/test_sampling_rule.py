"""Shapes: S samples, V vocabulary, N tree nodes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.decoding import CONTEXT, chain
from fakes.rules import resample_from_p, soft_q
from fakes.statistics import chi_square
from fakes.table_target import TableTarget
from falcon_lab.acceptance import SamplingRule, residual, without
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Budget, DraftOutput, RoundContext
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree
from falcon_lab.trees.layout import build_layout
from falcon_lab.trees.paths import Path, checked
from falcon_lab.trees.template_tree import candidates

TREE = checked(["0", "1", "2", "00", "01", "02", "10", "11", "20", "000", "001", "010", "100"])
PATHS = {"chain": tuple(chain(3)), "tree": TREE}
PROMPT = [1, 2]
SAMPLES = 20_000
RULE = SamplingRule(None, CONTEXT)
TARGET = TableTarget(4, seed=3)
FILTERS = {
    "plain": Sampling(temperature=1.0),
    "top-p": Sampling(temperature=0.9, top_p=0.8),
    "top-k": Sampling(temperature=1.3, top_k=3),
}


def trees(
    paths: tuple[Path, ...], proposal: Any, sampling: Sampling, generator: torch.Generator
) -> Any:
    """S trees that one drafter pass (k = 3) would give, all drawn at once."""
    layout = build_layout(paths, 3)
    plan = layout.passes[0]
    noise = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(17))
    rows = (TARGET.table[PROMPT[0], PROMPT[1]] + noise) / 2  # half right, as drafters are
    context = RoundContext(torch.tensor(PROMPT[-1]), Budget(), sampling, generator)
    output = DraftOutput(rows.expand(SAMPLES, 3, 4))
    tokens, log_q, q = candidates(output, plan.width, proposal, context)
    root = torch.full((SAMPLES, 1), PROMPT[-1])
    tokens = torch.cat((root, tokens.flatten(1)[:, plan.slots]), -1)
    log_q = torch.cat((torch.zeros(SAMPLES, 1), log_q.flatten(1)[:, plan.slots]), -1)
    q_row = torch.cat((torch.tensor([-1]), plan.rows))
    shape = (layout.parents, layout.depth, layout.ancestors, proposal)
    for sample in range(SAMPLES):
        tree = TokenTree(tokens[sample], *shape, log_q[sample])
        if bool(log_q[sample].isfinite().all()):
            yield tree if q is None else replace(tree, q=q[sample], q_row=q_row)
        else:
            yield pruned(replace(tree, q=None if q is None else q[sample], q_row=q_row))


def pruned(tree: TokenTree) -> TokenTree:
    """Without the nodes that were not proposed, and what is below them."""
    kept = (~(tree.ancestors & ~tree.log_q.isfinite()).any(-1)).nonzero().flatten()
    number = {int(node): place for place, node in enumerate(kept)}
    parents = torch.tensor([number.get(int(parent), -1) for parent in tree.parents[kept]])
    return TokenTree(
        tree.tokens[kept],
        parents,
        tree.depth[kept],
        tree.ancestors[kept][:, kept],
        tree.proposal,
        tree.log_q[kept],
        tree.q,
        None if tree.q_row is None else tree.q_row[kept],
    )


def outcomes(rule: Any, shape: str, proposal: Any, sampling: Sampling, samples: int) -> Tensor:
    """``[S, 3]``: the next tokens, those after the round drawn from the target."""
    generator = torch.Generator().manual_seed(5)
    texts = torch.full((samples, 5), -1)
    texts[:, :2] = torch.tensor(PROMPT)
    for text, tree in zip(texts, trees(PATHS[shape], proposal, sampling, generator), strict=False):
        before = torch.cat((tree.tokens, text[:1]))[tree.parents]
        accepted = rule(tree, TARGET.table[before, tree.tokens], sampling, generator)
        new = torch.cat((tree.tokens[accepted.path[1:]], accepted.next_token[None]))[:3]
        text[2 : 2 + len(new)] = new
    for place in (3, 4):
        drawn = sampling.draw(TARGET.table[texts[:, place - 2], texts[:, place - 1]], generator)
        texts[:, place] = torch.where(texts[:, place] < 0, drawn, texts[:, place])
    return texts[:, 2:]


def p_value(rule: Any, shape: str, proposal: Any, sampling: Sampling, samples: int) -> float:
    exact = TARGET.joint(PROMPT, sampling, 3)
    return chi_square(outcomes(rule, shape, proposal, sampling, samples), exact)


@pytest.mark.parametrize(
    ("shape", "proposal", "filters"),
    [
        ("chain", "deterministic", "plain"),
        ("chain", "sampled", "plain"),
        ("tree", "deterministic", "plain"),
        ("tree", "deterministic", "top-p"),
        ("tree", "sampled", "plain"),
        ("tree", "sampled", "top-p"),
        ("tree", "sampled", "top-k"),
    ],
)
def test_three_tokens_follow_the_targets_own_distribution(
    shape: str, proposal: str, filters: str
) -> None:
    samples = SAMPLES if filters == "plain" else SAMPLES // 2
    assert p_value(RULE, shape, proposal, FILTERS[filters], samples) > 0.01


@pytest.mark.parametrize("biased", [soft_q, resample_from_p])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_the_same_test_fails_for_a_biased_rule_on_fewer_samples(biased: Any, shape: str) -> None:
    assert p_value(biased, shape, "deterministic", FILTERS["plain"], samples=4000) < 1e-6


def one_tree(proposal: Any = "deterministic") -> tuple[TokenTree, Tensor]:
    tree = next(trees(TREE, proposal, FILTERS["plain"], torch.Generator().manual_seed(0)))
    return tree, torch.randn(tree.nodes, 4, generator=torch.Generator().manual_seed(1))


def test_a_drafters_confidence_never_enters_the_acceptance_of_chosen_candidates() -> None:
    tree, logits = one_tree()
    sampling = FILTERS["plain"]
    claims = (tree.log_q, torch.zeros_like(tree.log_q), torch.full_like(tree.log_q, -9.0))
    for seed in range(50):
        found = [
            RULE(
                replace(tree, log_q=claim), logits, sampling, torch.Generator().manual_seed(seed)
            ).path.tolist()
            for claim in claims
        ]
        assert found[0] == found[1] == found[2]


def test_chosen_candidates_take_one_draw_per_token_as_plain_decoding_does() -> None:
    tree, logits = one_tree()
    sampling = FILTERS["plain"]
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        accepted = RULE(tree, logits, sampling, generator)
        again = torch.Generator().manual_seed(seed)
        drawn = [int(sampling.draw(logits[node], again)) for node in accepted.path]
        path = tree.tokens[accepted.path[1:]].tolist()
        assert drawn == [*path, int(accepted.next_token)]
        assert torch.equal(generator.get_state(), again.get_state())


def test_an_accepted_path_descends_from_parent_to_child() -> None:
    tree, logits = one_tree("sampled")
    lengths = set()
    for seed in range(50):
        accepted = RULE(tree, logits, FILTERS["plain"], torch.Generator().manual_seed(seed))
        path = accepted.path.tolist()
        lengths.add(len(path))
        assert path[0] == 0
        assert all(tree.parents[child] == parent for parent, child in pairwise(path))
    assert len(lengths) > 1


def test_a_sampled_tree_without_its_distributions_is_refused() -> None:
    tree, logits = one_tree("sampled")
    with pytest.raises(FalconLabError, match="must carry q and q_row"):
        RULE(replace(tree, q=None), logits, FILTERS["plain"], torch.Generator())


def test_what_is_left_after_a_refusal_is_normalised() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.7, 0.1, 0.2])
    torch.testing.assert_close(residual(p, q), torch.tensor([0.0, 1.0, 0.0]))
    torch.testing.assert_close(residual(p, p), p)
    torch.testing.assert_close(without(q, 0), torch.tensor([0.0, 1 / 3, 2 / 3]))
    assert without(torch.tensor([0.0, 1.0]), 1).tolist() == [0.0, 0.0]
