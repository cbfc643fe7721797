from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from aded_cases import FAMILIES, FOLDER, KNOWN, drafter, engine, knowing, table_of, target
from falcon_lab_aded.search import TreeSearch
from falcon_lab_aded.successors import Adaptive, Successors, nothing

from falcon_lab import testing
from falcon_lab.interfaces import Frontier, Observation

PROMPTS = [[5], [3, 1, 4, 1, 5, 9]]
PATHS = {"name": "paths", "nodes": 24, "depth": 4}
V = 12


def searched(known: Any, iterations: int, depth: int) -> TreeSearch:
    made = TreeSearch(known, V, 1, 2, depth=depth, c1=32.0, c2=8.0, random=Random(0))
    made.run(iterations)
    return made


def test_the_distribution_is_as_users_expect_one() -> None:
    testing.check_distribution(FOLDER)


# --- the search ------------------------------------------------------------------------------


def test_the_visits_of_a_small_search_are_those_computed_by_hand() -> None:
    """Two successors, P 0.75 and 0.25, and one level: their rewards are 1.75 and 1.25.

    With N visits of the root the factor is (32 + ln((N + 9) / 8)) √N: 32.22, 45.71, 56.13, 64.97,
    72.81. The first iteration opens the root. The second takes A (24.17 and 8.06), the third A
    again (1.75 + 17.14 and 11.43), the fourth too (1.75 + 14.03 and 14.03), the fifth B
    (1.75 + 12.18 and 16.24), the sixth A (1.75 + 13.65 and 1.25 + 9.10).
    """
    known = knowing({(1, 2): {3: 0.75, 4: 0.25}}, V)
    visits = [searched(known, iterations, 1).visits for iterations in range(1, 7)]
    assert visits == [[1, 0, 0], [2, 1, 0], [3, 2, 0], [4, 3, 0], [5, 3, 1], [6, 4, 1]]


def test_below_a_node_that_was_opened_the_search_goes_deeper() -> None:
    """One way of three tokens: the n-th iteration opens the n-th node, and gives all above it."""
    known = knowing({(1, 2): {3: 1.0}, (2, 3): {4: 0.5}, (3, 4): {5: 0.5}}, V)
    found = [searched(known, iterations, 3) for iterations in (1, 2, 3, 4, 6)]
    assert [made.visits for made in found] == [
        [1, 0],
        [2, 1, 0],
        [3, 2, 1, 0],
        [4, 3, 2, 1],
        [6, 5, 4, 3],
    ]
    assert [found[-1].path(node) for node in found[-1].best(24)] == [[3], [3, 4], [3, 4, 5]]
    assert found[-1].best(2) == [1, 2]


def test_nodes_come_after_their_parents_and_by_their_visits() -> None:
    draw = Random(3)
    contexts = {
        (a, b): {draw.randrange(V): draw.random() for _ in range(4)}
        for a in range(V)
        for b in range(V)
    }
    made = searched(knowing(contexts, V), 150, 4)
    best = made.best(24)
    assert len(best) == 24
    assert [made.visits[node] for node in best] == sorted(made.visits, reverse=True)[1:25]
    assert all(made.above[node] in {0, *best[:place]} for place, node in enumerate(best))
    assert made.visits[0] == 150
    assert max(len(made.path(node)) for node in range(len(made.tokens))) == 4


# --- what a text changes ---------------------------------------------------------------------


def test_a_trigram_of_the_text_gains_with_every_token_of_its_window() -> None:
    """By hand: 1 2 3 is among the newest four tokens when 3 comes, and when 4 does."""
    known = knowing({(1, 2): {3: 0.5, 9: 0.5}}, V)
    made = Adaptive(known, V, update=0.04, cap=3.0, window=4)
    made.extend([1, 2])
    assert made.successors(1 * V + 2).scores == [0.5, 0.5]
    found = []
    for token in (3, 4, 5):
        made.extend([token])
        found.append(made.successors(1 * V + 2).scores)
    assert [scores[0] for scores in found] == pytest.approx([0.54, 0.58, 0.58])
    assert all(scores[1] == 0.5 for scores in found)
    assert made.successors(2 * V + 3) == Successors.of([4], [0.08])


def test_a_score_grows_to_the_cap() -> None:
    made = Adaptive(nothing, V, update=0.4, cap=1.0, window=16)
    made.extend([1] * 20)
    assert made.successors(1 * V + 1) == Successors.of([1], [1.0])


@pytest.mark.parametrize("window", [3, 5, 16])
def test_what_was_learnt_does_not_depend_on_how_the_text_came(window: int) -> None:
    draw = Random(4)
    text = [draw.randrange(3) for _ in range(60)]
    expected: dict[tuple[int, int], dict[int, float]] = {}
    for length in range(1, len(text) + 1):
        newest = text[max(0, length - window) : length]
        for a, b, c in zip(newest, newest[1:], newest[2:], strict=False):
            of = expected.setdefault((a, b), {})
            of[c] = of.get(c, 0.0) + 0.25
    for parts in ((60,), (1, 2, 7, 50), (1,) * 60):
        made, begin = Adaptive(nothing, V, update=0.25, cap=1e9, window=window), 0
        for part in parts:
            made.extend(text[begin : begin + part])
            begin += part
        for (a, b), of in expected.items():
            found = made.successors(a * V + b)
            assert dict(zip(found.tokens, found.scores, strict=True)) == of


def test_without_a_table_a_repetition_is_drafted() -> None:
    made = drafter(target())
    made.reset(torch.tensor(1))
    made.observe(Observation(torch.tensor([2, 3, 4, 1, 2]), None))
    output = made.draft(Frontier.root(torch.device("cpu")))
    assert output.paths == [[3], [3, 4], [3, 4, 1], [3, 4, 1, 2]]
    assert output.logits.argmax(-1).tolist() == [[3, 4, 1, 2]]
    below = Frontier(torch.tensor([[3, 4, 1, 2]]), torch.tensor([0]))
    assert made.draft(below).logits.shape == (1, 0, V)


# --- decoding --------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Tri-grams of a target's own texts."""
    model, path = target(), tmp_path / "table.safetensors"
    texts = [testing.plain_text(model, [first], 40) for first in range(V)]
    texts += [testing.plain_text(model, prompt, 40, temperature=1.0) for prompt in PROMPTS]
    table_of(texts, V, tokenizer=model.tokenizer).save(path)
    return str(path)


def test_it_keeps_the_promises_of_a_drafter(table: str) -> None:
    node = {"name": "aded", "table": table, "iterations": 20}
    testing.check_drafter(lambda context: KNOWN.build("drafter", node, context))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_target_s_own(family: str, table: str) -> None:
    model = target(family)
    rounds = testing.lossless_rounds(
        engine(model, drafter(model, table=table), tree=PATHS), PROMPTS, 40
    )
    assert testing.accepted(rounds) > 0
    assert max(one.nodes for one in rounds) > 4


def test_a_batch_shares_the_table_and_nothing_else(table: str) -> None:
    model = target()
    made = engine(model, drafter(model, table=table), tree=PATHS)
    together = testing.write_together(made, PROMPTS * 2, 24, batch_size=3)
    alone = [testing.write(made, prompt, 24) for prompt in PROMPTS * 2]
    assert [one.rounds for one in together] == [one.rounds for one in alone]


@pytest.mark.parametrize("top_p", [0.7, 1.0])
def test_nucleus_matching_follows_the_target_s_nucleus(top_p: float) -> None:
    """A token is drawn from the nucleus at every node, and matched: the one-hot rule."""
    model = testing.tiny_target(vocab=5, layers=2)
    made = engine(model, drafter(model), tree=PATHS)
    generator = torch.Generator().manual_seed(5)
    prompt = [3, 1, 4, 3, 1]
    chance = testing.fit(
        made, prompt, samples=400, generator=generator, temperature=0.9, top_p=top_p
    )
    assert chance > 0.01
    sampling = {"temperature": 0.9, "top_p": top_p}
    for seed in range(3):
        ours, plain = (
            testing.write(made, prompt, 20, generator=generator.manual_seed(seed), **sampling),
            testing.plain_text(
                model, prompt, 20, generator=generator.manual_seed(seed), **sampling
            ),
        )
        assert ours.tokens == plain
