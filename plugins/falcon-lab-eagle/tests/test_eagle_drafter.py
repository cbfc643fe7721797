"""What EAGLE's heads draft."""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import pytest
import torch
from eagle_cases import FAMILIES, HEADS, TREES, drafter, engine, inputs, target, text
from falcon_lab_eagle import EagleConfig
from falcon_lab_eagle.eagle import EagleDrafter
from falcon_lab_eagle.tree import published_tree

from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import BuildContext, Frontier, Observation, TrainableDrafter
from falcon_lab.plugins.builtins import FalconConfig
from falcon_lab.testing import accepted, fit, lossless_rounds, write, write_together
from falcon_lab.trees.layout import build_layout
from falcon_lab.trees.paths import from_child_counts

ROOT = Frontier.root(torch.device("cpu"))
every_head = pytest.mark.parametrize("head", sorted(HEADS))


# --- the law ---------------------------------------------------------------------------------


@every_head
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_speculation_writes_what_plain_decoding_writes(family: str, head: str) -> None:
    made, taken = drafter(head, on=target(family)), 0
    for tree in TREES.values():
        one = engine(target(family), made, tree=tree)
        taken += accepted(lossless_rounds(one, [[2], [3, 1, 4, 1, 5]], 24))
    assert taken > 0, "no draft token was ever accepted: the test has seen nothing"


@pytest.mark.parametrize(
    ("head", "name", "proposal"),
    [
        ("eagle", "eagle1", "deterministic"),
        ("eagle", "eagle1", "sampled"),
        ("eagle3", "chain", "sampled"),
        ("eagle3", "dynamic", "deterministic"),
    ],
)
def test_sampled_speculation_follows_the_targets_own_distribution(
    head: str, name: str, proposal: str
) -> None:
    host = target(vocab=6)
    tree = TREES[name] | ({"proposal": proposal} if name != "dynamic" else {})
    one, generator = engine(host, drafter(head, on=host), tree=tree), torch.Generator()
    settings = {"samples": 300, "temperature": 0.8, "top_p": 0.95}
    assert fit(one, [3, 1, 4], generator=generator.manual_seed(11), **settings) > 0.01


# --- EAGLE-1 is Falcon with a block of one ---------------------------------------------------


def twins() -> tuple[FalconDrafter, EagleDrafter]:
    config = FalconConfig(block=1, fuse="linear")
    falcon = FalconDrafter(config, BuildContext(target())).eval()
    eagle = EagleDrafter(EagleConfig(), BuildContext(target())).eval()
    eagle.load_state_dict(falcon.state_dict())
    return falcon, eagle


def test_it_begins_with_falcons_weights() -> None:
    states = []
    for kind, config in (
        (FalconDrafter, FalconConfig(block=1, fuse="linear")),
        (EagleDrafter, EagleConfig()),
    ):
        torch.manual_seed(5)
        states.append(kind(config, BuildContext(target())).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_it_learns_bit_for_bit_as_falcon() -> None:
    outcomes = []
    for made in twins():
        made.train()
        first, *later = islice(made.unroll(inputs(made, 9, 6)), 3)
        called = made(inputs(made, 9, 6))
        logits = made.logits(called.features)
        (logits.square().mean() + later[-1].features.square().mean()).backward()
        gradients = [weight.grad for weight in made.parameters()]
        outcomes.append([first.features, called.features, called.label, logits, *gradients])
    for ours, falcons in zip(*outcomes, strict=True):
        assert torch.equal(ours, falcons)


def test_it_drafts_bit_for_bit_as_falcon() -> None:
    outputs = []
    tokens = text(14)
    features = torch.randn(14, 32, generator=torch.Generator().manual_seed(1))
    for made in twins():
        made.reset(tokens[0])
        found = []
        for part in (slice(0, 9), slice(9, 10), slice(10, 14)):
            made.observe(Observation(tokens[part], features[part]))
            found.append(made.draft(ROOT))
            found.append(made.draft(Frontier(torch.tensor([[1], [2]]), torch.tensor([0, 0]))))
            deeper = Frontier(torch.tensor([[3], [4], [5]]), torch.tensor([1, 0, 1]))
            found.append(made.draft(deeper))
        outputs.append(found)
    for ours, falcons in zip(*outputs, strict=True):
        assert torch.equal(ours.logits, falcons.logits)
        assert torch.equal(ours.features, falcons.features)


# --- every head ------------------------------------------------------------------------------


@every_head
def test_it_fulfils_what_training_asks_for(head: str) -> None:
    made = drafter(head)
    assert isinstance(made, TrainableDrafter)
    assert made.unrolls
    assert made.block == 1


@every_head
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_pass_predicts_what_drafting_predicts_in_that_pass(
    family: str, head: str
) -> None:
    made = drafter(head, on=target(family))
    given = inputs(made, 8, 5)
    passes = list(islice(made.unroll(given), 3))
    for newest in (0, 4, 7):
        seen = slice(0, newest + 1)
        taps = None if given.taps is None else given.taps[0, seen]
        made.reset(given.tokens[0, 0])
        made.observe(Observation(given.tokens[0, seen], given.features[0, seen], taps=taps))
        frontier = ROOT
        for number, prediction in enumerate(passes):
            output = made.draft(frontier)
            [row] = (prediction.source[0] == newest).nonzero()[:, 0].tolist()
            assert prediction.label[0, row] == newest + 1 + number
            ours = prediction.features if prediction.hidden is None else prediction.hidden
            torch.testing.assert_close(made.logits(ours[0, row]), output.logits[0, 0], atol=1e-4,
                                       rtol=1e-4)  # fmt: skip
            if newest + number + 1 >= 8:
                break
            following = given.tokens[0, newest + number + 1]
            frontier = Frontier(following.view(1, 1), torch.zeros(1, dtype=torch.long))


@every_head
def test_a_batch_writes_what_each_row_writes_alone(head: str) -> None:
    one = engine(target(), drafter(head), tree=TREES["dynamic"])
    prompts = [[3, 1, 4, 1, 5, 9, 2], [2, 7], [6]]
    found = write_together(one, prompts, 12)
    for prompt, ours in zip(prompts, found, strict=True):
        alone = write(one, prompt, 12)
        assert ours.tokens == alone.tokens
        assert ours.rounds == alone.rounds


# --- the published trees ---------------------------------------------------------------------


def test_the_tree_of_the_paper_has_its_nodes_mask_and_paths() -> None:
    context = BuildContext(target(), 1)
    layout = build_layout(from_child_counts(published_tree(None, context)), 1)
    names = ["".join(map(str, path)) for path in layout.paths]
    first = "0 1 2 3 00 01 02 10 11 20 21 30"
    rest = "000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    assert names == ["", *first.split(), *rest.split()]
    assert [int((layout.depth == depth).sum()) for depth in range(6)] == [1, 4, 8, 8, 3, 2]
    for node, name in enumerate(names):
        seen = [names[other] for other in layout.ancestors[node].nonzero()[:, 0].tolist()]
        assert seen == [name[:length] for length in range(len(name) + 1)]
    inner = {name[:-1] for name in names if name}
    leaves = [name for name in names if name not in inner]
    assert len(leaves) == 15
    assert leaves[-2:] == ["00000", "00001"]
    paths = [layout.ancestors[names.index(leaf)].nonzero()[:, 0].tolist() for leaf in leaves]
    assert paths[-1] == [0, 1, 5, 13, 21, 25]
    assert paths[0] == [0, 2, 9]


def by_the_book(made: Any, nodes: int, beam: int, depth: int) -> set[tuple[int, ...]]:
    """Return the paths of EAGLE-2's tree (arXiv 2406.16858, §4), read literally."""
    frontier, paths, scores = ROOT, [()], [0.0]
    found: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(depth):
        top, tokens = made.draft(frontier).logits[:, 0].log_softmax(-1).topk(beam)
        children = [
            (scores[parent] + float(top[parent, rank]), parent, int(tokens[parent, rank]))
            for parent, rank in product(range(len(paths)), range(beam))
        ]
        found += [(score, (*paths[parent], token)) for score, parent, token in children]
        kept = sorted(children, reverse=True)[:beam]
        paths = [(*paths[parent], token) for _, parent, token in kept]
        scores = [score for score, _, _ in kept]
        parents = torch.tensor([parent for _, parent, _ in kept])
        frontier = Frontier(torch.tensor([[path[-1]] for path in paths]), parents)
    return {path for _, path in sorted(found, reverse=True)[:nodes]}


@pytest.mark.parametrize("head", ["eagle", "eagle3"])
@pytest.mark.parametrize("sharpness", [1.0, 9.0])
def test_eagle_2s_numbers_give_eagle_2s_tree(head: str, sharpness: float) -> None:
    host = target(vocab=64)
    made, trees = drafter(head, on=host), list[Any]()
    flat = made.logits
    made.logits = lambda hidden: sharpness * flat(hidden)
    one = engine(host, made, tree=TREES["eagle2"])
    prompt = torch.tensor([3, 1, 4, 1])
    written = write(one, prompt.tolist(), 20, on_round=lambda *said: trees.append(said[2]))
    first = trees[1]  # there is none for the first token
    paths = {tuple(first.tokens[above.nonzero()[1:, 0]].tolist()) for above in first.ancestors[1:]}
    read = one.target.prefill(prompt, one.target.new_cache(4))
    made.reset(prompt[0])
    tokens = torch.tensor([1, 4, 1, written.tokens[0]])
    features = read.features if "features" in made.needs else None
    made.observe(Observation(tokens, features, taps=read.taps))
    with torch.inference_mode():
        assert paths == by_the_book(made, nodes=60, beam=10, depth=7)
    assert len(paths) == 60
    assert (max(map(len, paths)) == 7) is (sharpness > 1)
