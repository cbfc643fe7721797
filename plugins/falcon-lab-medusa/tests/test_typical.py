from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from falcon_lab_medusa import TypicalConfig
from falcon_lab_medusa.typical import Typical

from falcon_lab import fields
from falcon_lab.acceptance import Greedy
from falcon_lab.errors import ConfigError
from falcon_lab.interfaces import BuildContext
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree, ancestor_matrix

HOST: Any = None
WARM = Sampling(temperature=1.0)


def tree(tokens: list[int], parents: list[int]) -> TokenTree:
    above = torch.tensor(parents)
    ancestors = ancestor_matrix(above)
    depth = ancestors.sum(-1) - 1
    return TokenTree(
        torch.tensor(tokens), above, depth, ancestors, "deterministic", torch.zeros(len(tokens))
    )


def logits(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log().float()


def accept(
    drafts: TokenTree, p: torch.Tensor, sampling: Sampling = WARM, **options: float
) -> tuple[list[int], int]:
    rule = Typical(TypicalConfig(**options), BuildContext(HOST))
    found = rule(drafts, p, sampling, torch.Generator().manual_seed(0))
    return found.path.tolist(), int(found.next_token)


UNIFORM = [0.25] * 4
SURE = [0.97, 0.01, 0.01, 0.01]


def test_it_says_that_it_is_lossy() -> None:
    assert Typical(TypicalConfig(), BuildContext(HOST)).lossless is False


def test_the_bar_is_epsilon_where_the_target_is_sure() -> None:
    # exp(-H) of SURE is 0.85, times 0.3 more than 0.09: 0.09 decides, and 0.01 is less.
    assert accept(tree([0, 1], [-1, 0]), logits([SURE, UNIFORM]))[0] == [0]
    assert accept(tree([0, 0], [-1, 0]), logits([SURE, UNIFORM]))[0] == [0, 1]
    assert accept(tree([0, 1], [-1, 0]), logits([SURE, UNIFORM]), epsilon=0.009)[0] == [0, 1]


def test_the_bar_falls_with_the_target_s_entropy() -> None:
    # exp(-H) of a uniform distribution over V is 1/V, so alpha / V decides below epsilon·V.
    for vocabulary in (4, 20, 100):
        flat = [1 / vocabulary] * vocabulary
        drafts = tree([0, vocabulary - 1], [-1, 0])
        assert accept(drafts, logits([flat, flat]), epsilon=1.0)[0] == [0, 1]
        assert accept(drafts, logits([flat, flat]), epsilon=1.0, alpha=1.0)[0] == [0]
    peaked = [0.5, *[0.5 / 99] * 99]
    entropy = 0.5 * math.log(2) + 0.5 * math.log(2 * 99)
    drafts = tree([0, 7], [-1, 0])
    for alpha, path in (
        (0.5 / 99 * math.exp(entropy) * 0.99, [0, 1]),
        (0.5 / 99 * math.exp(entropy) * 1.01, [0]),
    ):
        assert accept(drafts, logits([peaked, peaked]), alpha=alpha)[0] == path


def test_the_longest_accepted_path_is_kept() -> None:
    # Node 1 (p 0.6) is likelier than node 2 (p 0.4), but nothing below it is typical.
    rows = [[0.6, 0.4, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], UNIFORM, UNIFORM]
    drafts = tree([3, 0, 1, 3, 2], [-1, 0, 0, 1, 2])
    assert accept(drafts, logits(rows))[0] == [0, 2, 4]


def test_the_likelier_of_two_paths_of_one_length_is_kept() -> None:
    rows = [[0.4, 0.6, 0, 0], [0.9, 0.1, 0, 0], [0.5, 0.5, 0, 0], UNIFORM, UNIFORM]
    drafts = tree([3, 0, 1, 0, 1], [-1, 0, 0, 1, 2])  # 0.4·0.9 = 0.36 against 0.6·0.5 = 0.3
    assert accept(drafts, logits(rows))[0] == [0, 1, 3]


def test_a_node_below_one_that_is_refused_is_refused() -> None:
    rows = [SURE, [0, 1, 0, 0], UNIFORM]
    assert accept(tree([3, 2, 1], [-1, 0, 1]), logits(rows))[0] == [0]


def test_what_follows_is_drawn_from_the_target() -> None:
    drafts = tree([3, 0], [-1, 0])
    after = torch.tensor([0.0, 0.7, 0.3, 0.0])
    generator, drawn = torch.Generator().manual_seed(0), torch.zeros(4)
    rule = Typical(TypicalConfig(), BuildContext(HOST))
    for _ in range(500):
        found = rule(drafts, logits([SURE, after.tolist()]), WARM, generator)
        drawn[found.next_token] += 1 / 500
    assert (drawn - after).abs().max() < 0.07


def test_at_temperature_0_only_exact_matches_are_accepted() -> None:
    torch.manual_seed(0)
    drafts = tree([3, 0, 1, 2, 0, 1], [-1, 0, 0, 1, 1, 2])
    greedy, typical = Greedy(None, BuildContext(HOST)), Typical(TypicalConfig(), BuildContext(HOST))
    for seed in range(20):
        p = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        expected = greedy(drafts, p, Sampling(), torch.Generator())
        found = typical(drafts, p, Sampling(), torch.Generator())
        assert torch.equal(found.path, expected.path)
        assert found.next_token == expected.next_token


def test_temperature_and_filters_come_before_the_bar() -> None:
    rows = logits([[0.55, 0.25, 0.15, 0.05], UNIFORM])
    drafts = tree([3, 2], [-1, 0])
    assert accept(drafts, rows)[0] == [0, 1]
    assert accept(drafts, rows, Sampling(temperature=1.0, top_k=2))[0] == [0]
    assert accept(drafts, rows, Sampling(temperature=0.3))[0] == [0]


@pytest.mark.parametrize("key", ["epsilon", "alpha"])
def test_a_threshold_outside_of_its_range_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"acceptance.{key}"):
        fields.options(TypicalConfig, {key: 0.0}, "acceptance")
