from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.decoding import CONTEXT, chain, generate, plain, speculative
from fakes.drafters import OracleDrafter, RandomDrafter, SilentDrafter, TableDrafter
from fakes.statistics import chi_square
from fakes.table_target import TableTarget
from fakes.tokenizer import Pieces
from fakes.trees import prefix_closed
from falcon_lab.acceptance import Greedy
from falcon_lab.controllers import Fixed
from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.round import at_most
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Budget, DraftOutput, RoundOutcome
from falcon_lab.plugins.builtins import FixedConfig
from falcon_lab.sampling import Sampling
from falcon_lab.trees.paths import Path, checked
from falcon_lab.trees.template_tree import TemplateTree
from falcon_lab.trees.templates import named

VOCAB = 12
TARGET = TableTarget(VOCAB)
PROMPT = [1, 2]
BLOCKS = [1, 2, 3, 4]
SHIPPED = ["vicuna", "llama", "k3", "k4", "auto"]
PIECES = Pieces(["a", "b", "ab", "ba", "c", "xyz", "d", "cd", "e", "f", "g", "h"])


def oracle(
    target: Any, block: int, prompt: list[int] = PROMPT, new: int = 40, seed: int = 0
) -> Any:
    truth = prompt + plain(target, prompt, new).tokens
    return OracleDrafter(target.vocab_size, block, truth, seed=seed)


def same(ours: Generation, theirs: Generation) -> None:
    assert ours.tokens == theirs.tokens
    assert ours.finish == theirs.finish


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", ["chain", *SHIPPED])
def test_greedy_output_is_plain_decodings_and_trees_are_followed(name: str, block: int) -> None:
    paths = chain(8) if name == "chain" else named(name, block)
    out = generate(speculative(TARGET, oracle(TARGET, block), paths), PROMPT, 40)
    same(out, plain(TARGET, PROMPT, 40))
    assert max(round_.accepted for round_ in out.rounds) >= 3


@given(
    prefix_closed(),
    st.sampled_from(BLOCKS),
    st.integers(0, 99),
    st.integers(1, 20),
    st.integers(1, 4),
)
def test_greedy_output_is_plain_decodings_for_any_tree_and_length(
    paths: list[Path], block: int, seed: int, new: int, length: int
) -> None:
    target, prompt = TableTarget(VOCAB, seed=seed), [seed % VOCAB, 2, 5, 4][:length]
    drafter = oracle(target, block, prompt, new, seed)
    same(generate(speculative(target, drafter, paths), prompt, new), plain(target, prompt, new))


@pytest.mark.parametrize("block", BLOCKS)
def test_a_drafter_is_told_every_token_and_the_feature_before_it(block: int) -> None:
    class Told(OracleDrafter, TableDrafter):
        """An oracle that checks what it observes."""

    for prompt in ([3], [1, 2, 3, 4]):
        truth = prompt + plain(TARGET, prompt, 30).tokens
        drafter = Told(VOCAB, block, truth)
        out = generate(speculative(TARGET, drafter, named("auto", block)), prompt, 30)
        assert drafter.text == prompt + out.tokens


def test_a_drafter_that_needs_no_features_gets_none() -> None:
    class Blind(RandomDrafter):
        needs = frozenset()

        def observe(self, observation: Any) -> None:
            assert observation.features is None

    same(generate(speculative(TARGET, Blind(VOCAB, 2), chain(4)), PROMPT), plain(TARGET, PROMPT))


STOPS = {
    "end tokens": [StopCondition({eos}) for eos in range(VOCAB)],
    "stop strings": [
        StopCondition((), [string], PIECES)
        for string in ("aa", "ab", "ca", "zx", "dxy", "bab", "e", "hh", "fg", "gb")
    ],
}


@pytest.mark.parametrize("kind", STOPS)
def test_an_end_inside_an_accepted_path_cuts_as_plain_decoding_does(kind: str) -> None:
    cuts: list[int] = []

    def count(tokens: list[int], _: int, __: Any, accepted: Any) -> None:
        if accepted is not None:
            cuts.append(len(accepted.path) - len(tokens))

    for seed in range(4):
        target = TableTarget(VOCAB, seed=seed)
        for stop in STOPS[kind]:
            engine = speculative(target, oracle(target, 4), named("auto", 4))
            ours = generate(engine, PROMPT, 40, stop=stop, on_round=count)
            same(ours, plain(target, PROMPT, 40, stop=stop))
    assert sum(cut > 0 for cut in cuts) >= 5  # there were such ends


def test_cut_rounds_count_what_was_kept() -> None:
    free = generate(speculative(TARGET, oracle(TARGET, 4), chain(8)), PROMPT, 40)
    big = max(range(len(free.rounds)), key=lambda index: free.rounds[index].accepted)
    first = 1 + sum(round_.emitted for round_ in free.rounds[:big])
    eos = free.tokens[first]
    out = generate(
        speculative(TARGET, oracle(TARGET, 4), chain(8)), PROMPT, 40, stop=StopCondition({eos})
    )
    assert out.finish == "eos"
    assert out.rounds[-1].accepted <= out.rounds[-1].emitted
    assert 1 + sum(round_.emitted for round_ in out.rounds) == len(out.tokens)


@pytest.mark.parametrize("new", [1, 2, 3, 5])
def test_nothing_is_drafted_beyond_what_is_to_be_written(new: int) -> None:
    out = generate(speculative(TARGET, RandomDrafter(VOCAB, 2), named("vicuna", 2)), PROMPT, new)
    same(out, plain(TARGET, PROMPT, new))
    written = 1
    for round_ in out.rounds:
        assert round_.depth <= new - written - 1
        written += round_.emitted
    assert written == new


@pytest.mark.parametrize("positions", [3, 4, 7, 20])
def test_no_node_lies_beyond_the_targets_last_position(positions: int) -> None:
    target = TableTarget(VOCAB, positions=positions)  # asserts it for every tree
    out = generate(speculative(target, oracle(target, 2, new=50), named("vicuna", 2)), PROMPT, 50)
    same(out, plain(target, PROMPT, 50))
    assert (out.finish, len(out.tokens)) == ("context", positions - 2)


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_with_nothing_to_say_makes_plain_steps(proposal: str, temperature: float) -> None:
    engine = speculative(TARGET, SilentDrafter(VOCAB, 2), named("auto", 2), proposal=proposal)
    out = generate(engine, PROMPT, temperature=temperature)
    assert len(out.rounds) == 23
    assert {(r.nodes, r.depth, r.emitted) for r in out.rounds} == {(0, 0, 1)}
    assert [r.passes for r in out.rounds] == [1] * 22 + [0]  # the last token needs no draft


def test_a_builder_without_nodes_asks_no_drafter() -> None:
    out = generate(speculative(TARGET, RandomDrafter(VOCAB, 2), []), PROMPT)
    same(out, plain(TARGET, PROMPT))
    assert {round_.passes for round_ in out.rounds} == {0}


class Impatient(Fixed):
    """Stops after the first pass, and remembers what it observed."""

    def __init__(self) -> None:
        super().__init__(FixedConfig(), CONTEXT)
        self.outcomes: list[RoundOutcome] = []
        self.resets = 0

    def keep_going(self, passes: int, output: DraftOutput) -> bool:
        assert passes == 1
        return False

    def update(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)

    def reset(self) -> None:
        self.resets += 1


def test_a_controller_may_end_a_draft_and_learns_the_outcome() -> None:
    controller = Impatient()
    engine = speculative(TARGET, oracle(TARGET, 2), named("vicuna", 2), controller=controller)
    out = generate(engine, PROMPT, 40)
    same(out, plain(TARGET, PROMPT, 40))
    assert controller.resets == 1
    assert [(o.drafted, o.nodes, o.accepted) for o in controller.outcomes] == [
        (round_.depth, round_.nodes, round_.accepted) for round_ in out.rounds
    ]
    assert {round_.passes for round_ in out.rounds} <= {0, 1}
    assert max(round_.depth for round_ in out.rounds) == 2


@pytest.mark.parametrize(
    "budget",
    [FixedConfig(depth=3), FixedConfig(nodes=5), FixedConfig(passes=1), FixedConfig(depth=0)],
)
def test_the_controllers_budget_holds_in_every_round(budget: FixedConfig) -> None:
    controller = Fixed(budget, CONTEXT)
    engine = speculative(TARGET, oracle(TARGET, 2), named("vicuna", 2), controller=controller)
    out = generate(engine, PROMPT, 40)
    same(out, plain(TARGET, PROMPT, 40))
    for limit in ("depth", "nodes", "passes"):
        most = getattr(budget, limit)
        if most is not None:
            assert max(getattr(round_, limit) for round_ in out.rounds) == most


def test_a_budget_is_limited_in_depth_alone() -> None:
    assert at_most(Budget(nodes=3), depth=2) == Budget(depth=2, nodes=3)
    assert at_most(Budget(depth=1, passes=4), depth=2) == Budget(depth=1, passes=4)
    assert at_most(Budget(depth=5), depth=2) == Budget(depth=2)


def test_every_round_is_told_of_with_what_was_drafted_of_it() -> None:
    told: list[Any] = []
    out = generate(
        speculative(TARGET, oracle(TARGET, 2), named("auto", 2)),
        PROMPT,
        40,
        on_round=lambda *round_: told.append(round_),
    )
    assert told[0] == (out.tokens[:1], 0, None, None)
    assert [token for tokens, *_ in told for token in tokens] == out.tokens
    for (tokens, drafted, tree, accepted), round_ in zip(told[1:], out.rounds, strict=True):
        assert (len(tokens), drafted, tree.drafted) == (
            round_.emitted,
            round_.accepted,
            round_.nodes,
        )
        assert tree.tokens[accepted.path[1:]].tolist() == tokens[:drafted]


def test_the_parts_of_the_time_add_up() -> None:
    seconds = generate(speculative(TARGET, oracle(TARGET, 2), named("auto", 2)), PROMPT).seconds
    parts = (seconds.draft, seconds.verify, seconds.accept, seconds.commit, seconds.overhead)
    assert all(part > 0 for part in (*parts, seconds.prefill))
    assert seconds.total == pytest.approx(sum(parts))


def test_growing_the_tree_is_counted_as_overhead_and_not_as_drafting() -> None:
    class Slow(TemplateTree):
        def grow(self, output: DraftOutput) -> Any:
            time.sleep(0.01)
            return super().grow(output)

    builder = Slow(checked(chain(4)), 2, "deterministic")
    out = generate(speculative(TARGET, oracle(TARGET, 2), builder), PROMPT, 6)
    [passes] = [round_.passes for round_ in out.rounds]
    assert passes == 2
    assert out.seconds.overhead >= 0.01 * passes
    assert out.seconds.draft < 0.01


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(FalconLabError, match="prompt is empty"):
        generate(speculative(TARGET, RandomDrafter(VOCAB, 2), chain(2)), [])


def test_an_engine_is_lossless_when_its_rule_is() -> None:
    class Lossy(Greedy):
        lossless = False

    drafter = RandomDrafter(VOCAB, 2)
    assert speculative(TARGET, drafter, chain(2)).lossless
    assert not speculative(TARGET, drafter, chain(2), rule=Lossy(None, CONTEXT)).lossless


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", ["chain", "auto", "llama"])
def test_a_seed_gives_plain_decodings_text_when_candidates_are_chosen(
    name: str, block: int
) -> None:
    paths = chain(4) if name == "chain" else named(name, block)
    settings = {"temperature": 0.9, "top_p": 0.95, "seed": 3}
    ours = generate(speculative(TARGET, RandomDrafter(VOCAB, block), paths), PROMPT, 40, **settings)
    same(ours, plain(TARGET, PROMPT, 40, **settings))


@pytest.mark.parametrize(
    ("name", "proposal", "settings"),
    [
        ("chain", "deterministic", {"temperature": 0.8, "top_k": 3}),
        ("chain", "sampled", {"temperature": 1.0}),
        ("k2-8", "deterministic", {"temperature": 1.0}),
        ("k2-8", "sampled", {"temperature": 0.9, "top_p": 0.9}),
    ],
)
def test_three_sampled_tokens_follow_the_targets_distribution(
    name: str, proposal: str, settings: dict[str, Any]
) -> None:
    target, samples = TableTarget(4, seed=1), 1500
    paths = chain(4) if name == "chain" else named(name, 2)
    engine = speculative(target, RandomDrafter(4, 2), paths, proposal=proposal)
    generator = torch.Generator().manual_seed(7)
    # More tokens than are looked at, so that the rounds which write them are deep ones.
    texts = [
        generate(engine, PROMPT, 5, generator=generator, **settings).tokens[:3]
        for _ in range(samples)
    ]
    assert chi_square(torch.tensor(texts), target.joint(PROMPT, Sampling(**settings), 3)) > 0.01
