"""Shapes: P auxiliary nodes, V vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from falcon_lab_lookup import LookaheadConfig
from falcon_lab_lookup.lookahead import LookaheadDrafter
from falcon_lab_lookup.pool import Pool
from falcon_lab_lookup.window import Shape, Window, most_tokens, sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_cases import KNOWN, VOCAB, engine, target

from falcon_lab import fields
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.errors import ConfigError
from falcon_lab.interfaces import Drafter, Frontier, Observation
from falcon_lab.testing import accepted, build_drafter, fit, lossless_rounds, write, write_together

FAMILIES = ("gpt2", "llama", "mistral")


def drafter(family: str = "llama", **options: Any) -> LookaheadDrafter:
    made: LookaheadDrafter = build_drafter(
        target(family), {"name": "lookahead", **options}, components=KNOWN
    )
    return made


def looking(family: str = "llama", *, nodes: int = 32, **options: Any) -> SpeculativeEngine:
    """An engine that verifies the paths that are found."""
    tree = {"name": "paths", "nodes": nodes}
    return engine(target(family), drafter(family, **options), tree=tree)


# --- the window ------------------------------------------------------------------------------


@pytest.mark.parametrize(("ngram", "width"), [(3, 1), (3, 4), (5, 7), (7, 2)])
def test_a_window_fills_up_to_its_columns(ngram: int, width: int) -> None:
    window = Window(ngram, width, range(width + ngram - 3))
    counts = []
    for _ in range(ngram + 2):
        counts.append(window.counts)
        window.advance(99, [0] * window.counts[-1])
    assert counts == [sizes(ngram, width, min(levels, ngram - 1)) for levels in range(1, ngram + 3)]
    assert counts[-1] == (width - 1, *[width] * (ngram - 2))
    assert most_tokens(ngram, width) == max(map(sum, counts))


def test_the_papers_window_of_seven_columns_has_twenty_seven_tokens() -> None:
    assert (sizes(5, 7, 4), most_tokens(5, 7)) == ((6, 7, 7, 7), 27)


def test_a_column_sees_the_guesses_before_it_and_itself() -> None:
    shape = Shape.of((2, 3, 3))  # guesses a b; columns go on from the root, a and b
    seen = [{other for other in range(8) if bool(shape.mask[token, other])} for token in range(8)]
    assert seen == [{0}, {0, 1}, {2}, {0, 3}, {0, 1, 4}, {2, 5}, {0, 3, 6}, {0, 1, 4, 7}]
    assert shape.depth.tolist() == [1, 2, 1, 2, 3, 2, 3, 4]
    assert shape.deepest == 4


def test_the_columns_of_a_full_window_are_n_grams() -> None:
    window = Window(4, 2, [1, 2, 3])
    assert window.advance(0, [11, 12, 13]) == []  # behind 1, 2 and 3
    assert window.levels == [[2, 3], [11, 12, 13]]
    assert window.advance(5, [21, 22, 23]) == []  # behind 11, 12 and 13
    assert window.levels == [[3], [12, 13], [22, 23]]
    assert window.advance(7, [32, 33]) == [(7, (12, 22, 32)), (3, (13, 23, 33))]
    assert window.levels == [[13], [22, 23], [32, 33]]


def test_the_pool_keeps_the_newest_of_every_first_token() -> None:
    pool = Pool(2)
    for gram in ((1, 2), (3, 4), (1, 2), (5, 6)):
        pool.add(9, gram)
    pool.add(8, (1, 1))
    assert pool.behind(9) == [(5, 6), (1, 2)]
    assert pool.behind(8) == [(1, 1)]
    assert pool.behind(7) == []


# --- against the method, token by token, without masks or caches -----------------------------


class Literal:
    """Lookahead with a pass of the target for every single token of the window."""

    def __init__(self, ngram: int, width: int, guess: list[int]) -> None:
        self.window = Window(ngram, width, guess)
        self.pool = Pool(7)

    def round(self, text: list[int]) -> None:
        levels = self.window.levels
        last = len(levels) - 1
        new = []
        for place in range(len(levels[last])):
            if last == 0:
                path = levels[0][: place + 1]
            else:
                path = levels[0][:place] + [level[place] for level in levels[1:]]
            tokens = torch.tensor(text + path)
            one = target()
            logits = one.prefill(tokens, one.new_cache(len(tokens))).logits[-1]
            new.append(int(logits.argmax()))
        for first, gram in self.window.advance(text[-1], new):
            self.pool.add(first, gram)


@pytest.mark.parametrize("options", [{"ngram": 3, "window": 3}, {"ngram": 5, "window": 4}, {}])
def test_window_and_pool_are_what_single_passes_give(options: dict[str, int]) -> None:
    made, prompt = drafter(**options), [3, 1, 4, 1, 5]
    literal: list[Literal] = []
    text = list(prompt)

    def compare(tokens: list[int], drafted: int, tree: Any, accepted: Any) -> None:
        if tree is not None and tree.auxiliary:
            # Called after the round: the window has moved, the text not yet.
            literal[0].round(text)
            assert made.window is not None
            assert made.window.levels == literal[0].window.levels
            assert made.pool.grams == literal[0].pool.grams
        text.extend(tokens)
        if not literal:
            config = made.config
            count = config.window + config.ngram - 3
            guess = type(made._random)(config.seed).choices(text, k=count)
            literal.append(Literal(config.ngram, config.window, guess))

    write(engine(target(), made, tree={"name": "paths"}), prompt, 40, on_round=compare)
    assert sum(map(len, literal[0].pool.grams.values())) > 5


# --- lossless --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"ngram": 3, "window": 2, "guesses": 3}])
def test_greedy_output_is_the_targets_own_and_guesses_are_right(
    family: str, options: dict[str, int]
) -> None:
    one, taken = looking(family, **options), 0
    config: LookaheadConfig = one.drafter.config  # type: ignore[attr-defined]
    full = {sum(sizes(config.ngram, config.window, levels)) for levels in (1, 2)}
    for prompt in ([5], [1, 2, 3], [7, 7, 2, 9, 4, 1]):
        rounds = lossless_rounds(one, [prompt], 60)
        taken += accepted(rounds)
        assert {done.auxiliary for done in rounds[:2]} == full
    assert taken > 30


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    family=st.sampled_from(FAMILIES),
    prompt=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=8),
    new=st.integers(1, 95),
    ngram=st.integers(3, 6),
    window=st.integers(1, 6),
    guesses=st.integers(1, 4),
    from_text=st.booleans(),
    nodes=st.integers(0, 12),
)
def test_and_with_any_options_up_to_the_end_of_the_context(
    family: str, prompt: list[int], new: int, **options: Any
) -> None:
    lossless_rounds(looking(family, **options), [prompt], new)


def test_a_seed_gives_the_targets_own_text_when_sampling() -> None:
    one = looking(from_text=True)
    for temperature in (0.4, 1.0):
        lossless_rounds(one, [[3, 1]], 60, temperature=temperature)


def test_sampled_output_follows_the_targets_distribution() -> None:
    one, generator = looking(from_text=True), torch.Generator().manual_seed(11)
    settings = {"samples": 300, "temperature": 1.0, "top_k": 3}
    assert fit(one, [1, 2, 1, 2, 1], generator=generator, **settings) > 0.01


def test_a_row_of_a_batch_has_its_own_window_and_pool() -> None:
    one = looking("mistral", from_text=True)
    prompts = [[5, 9, 3], [7], [1, 2, 1, 2, 1, 2, 1], [4, 4]]
    together = write_together(one, prompts, 30, batch_size=3)
    alone = [write(one, prompt, 30) for prompt in prompts]
    assert [(text.tokens, text.rounds) for text in together] == [
        (text.tokens, text.rounds) for text in alone
    ]
    assert sum(accepted(text.rounds) for text in alone) > 5


# --- the drafter -----------------------------------------------------------------------------


def test_its_drafts_are_the_n_grams_of_the_newest_token() -> None:
    made, root = drafter(ngram=3, from_text=True), Frontier.root(torch.device("cpu"))
    made.reset(torch.tensor(1))
    made.observe(Observation(torch.tensor([2, 3, 1, 4, 5, 1]), None))
    output = made.draft(root)
    assert output.paths == [(4, 5), (2, 3)]
    assert output.logits.argmax(-1).tolist() == [[4, 5]]
    below = Frontier(torch.tensor([[4, 5]]), torch.tensor([0]))
    assert made.draft(below).logits.shape == (1, 0, VOCAB)


def test_a_chain_takes_the_newest_n_gram() -> None:
    made = drafter(from_text=True)
    one = engine(target(), made, tree={"name": "chain", "depth": made.block})
    assert accepted(lossless_rounds(one, [[3, 1, 4]], 60)) > 10


def test_it_says_how_many_auxiliary_nodes_there_are() -> None:
    made = drafter()
    assert isinstance(made, Drafter)
    assert (made.block, made.max_auxiliary, made.needs) == (4, 27, frozenset())


@pytest.mark.parametrize("options", [{"ngram": 2}, {"window": 0}, {"guesses": 0}])
def test_an_option_that_leaves_nothing_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        fields.options(LookaheadConfig, options, "drafter")
