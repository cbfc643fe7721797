from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from falcon_lab_selfspec import SelfSpecConfig
from falcon_lab_selfspec.drafter import default_skipped, plan_of
from selfspec_cases import CHAIN, FAMILIES, KNOWN, LAYERS, engine, target

from falcon_lab import fields, testing
from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.interfaces import LayerPlan
from falcon_lab.testing.decoding import PROMPTS

NOTHING: dict[str, Any] = {"skip_attention": [], "skip_mlp": []}
SOME: list[dict[str, Any]] = [{}, {"skip_attention": [1, 2], "skip_mlp": [2]}, {"layers": 2}]
BRANCHED = {"name": "static", "template": {"": 2, "0": 2, "00": 1}}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", SOME, ids=str)
def test_greedy_output_is_the_targets_own(family: str, options: dict[str, Any]) -> None:
    for tree in (CHAIN, BRANCHED):
        rounds = testing.lossless_rounds(engine(family, tree, **options), PROMPTS, 24)
        assert 0 < testing.accepted(rounds) < sum(one.depth for one in rounds)


@pytest.mark.parametrize("options", SOME[1:], ids=str)
def test_sampled_output_follows_the_targets_distribution(options: dict[str, Any]) -> None:
    sampled = {"name": "chain", "depth": 3, "proposal": "sampled"}
    one = engine("llama", sampled, {"name": "draft_exit"}, **options)
    settings = {"samples": 300, "temperature": 1.5, "top_k": 3}
    assert testing.fit(one, [3, 1], generator=torch.Generator().manual_seed(5), **settings) > 0.01


def note_tokens(seen: list[int], layer: Any, inputs: Any, output: Any) -> None:
    """Note how many tokens have gone through a layer."""
    seen.append(inputs[0].shape[1])


@pytest.mark.parametrize("tree", [CHAIN, BRANCHED], ids=["chain", "tree"])
def test_verification_goes_on_behind_the_layers_that_drafted(tree: dict[str, Any]) -> None:
    runs, texts = [], []
    for layers in (2, 0):  # which verification leaves out
        one = engine("llama", tree, layers=2)
        one.drafter.lower_layers = layers
        seen: list[int] = []
        note = partial(note_tokens, seen)
        hooks = [layer.register_forward_hook(note) for layer in target("llama").model.model.layers]
        texts.append(testing.write(one, PROMPTS[0], 24))
        for hook in hooks:
            hook.remove()
        runs.append(sum(seen))
    assert texts[0].tokens == texts[1].tokens == testing.plain_text(target("llama"), PROMPTS[0], 24)
    assert [r.accepted for r in texts[0].rounds] == [r.accepted for r in texts[1].rounds]
    assert runs[0] < runs[1]  # layers that tokens go through
    for text in texts:  # passes go through as many: the newest tokens are read in one of their own
        assert all(one.layers == 2 * one.passes + LAYERS for one in text.rounds if one.passes)


def test_layers_run_are_those_of_all_passes() -> None:
    one = engine("llama", CHAIN, skip_attention=[1, 2], skip_mlp=[2])
    for rounds in (
        testing.write(one, PROMPTS[0], 24).rounds,
        testing.write_together(one, PROMPTS, 24)[0].rounds,
    ):
        assert all(done.layers == 2.5 * done.passes + LAYERS for done in rounds)


def test_a_target_of_which_nothing_is_skipped_is_always_right() -> None:
    rounds = testing.lossless_rounds(engine(**NOTHING), PROMPTS, 24)
    assert all(one.accepted == one.depth for one in rounds)


@pytest.mark.parametrize(
    ("count", "skipped"), [(1, ()), (2, (1,)), (4, (2,)), (12, (4, 6, 8)), (30, range(8, 23, 2))]
)
def test_every_second_layer_of_the_middle_half_is_skipped_by_default(
    count: int, skipped: Any
) -> None:
    assert default_skipped(count) == frozenset(skipped)
    plan = plan_of(SelfSpecConfig(), count)
    assert plan.skip_attention == plan.skip_mlp == frozenset(skipped)


def test_one_of_the_two_lists_alone_leaves_the_other_part_of_every_layer() -> None:
    assert plan_of(SelfSpecConfig(skip_mlp=[2]), 4) == LayerPlan(skip_mlp=frozenset({2}))
    assert plan_of(SelfSpecConfig(layers=4), 4).is_whole


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"skip_attention": [-1]}, "drafter.skip_attention.*at least 0"),
        ({"skip_mlp": [2, 1, 2]}, "drafter.skip_mlp: has layer 2 twice"),
        ({"skip_mlp": ["a"]}, "drafter.skip_mlp"),
        ({"layers": 0}, "drafter.layers: is 0"),
        ({"layers": 2, "skip_mlp": [1]}, "drafter.layers: excludes skip_mlp"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused_by_name(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fields.options(SelfSpecConfig, options, "drafter")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"skip_attention": [LAYERS]}, "skip_attention: has layer 4; the target's are 0 to 3"),
        ({"skip_mlp": [0, 9]}, "skip_mlp: has layer 9"),
        ({"layers": LAYERS + 1}, "layers: is 5; the target has 4"),
        ({key: [*range(LAYERS)] for key in NOTHING}, "skip_attention: and skip_mlp skip all 4"),
    ],
    ids=str,
)
def test_layers_that_the_target_has_not_are_refused_by_name(options: Any, said: str) -> None:
    node = {"name": "selfspec", **options}
    with pytest.raises(FalconLabError, match=said):
        testing.build_drafter(target("llama"), node, components=KNOWN)
