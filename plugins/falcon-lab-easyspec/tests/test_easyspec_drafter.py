from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from easyspec_cases import BRANCHED, CHAIN, FAMILIES, KNOWN, LAYERS, drafter, engine, saved, target
from falcon_lab_easyspec import CALIBRATIONS, EasySpecConfig
from falcon_lab_easyspec.groups import groups_of, plan_of, stages

from falcon_lab import fields, testing
from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.interfaces import BuildContext
from falcon_lab.testing.compiling import Pretend
from falcon_lab.testing.decoding import PROMPTS


def test_the_contract_of_a_drafter_is_kept() -> None:
    def build(context: BuildContext) -> Any:
        node = {"name": "easyspec", "groups": [[0, 1]]}  # the kit's targets have two layers
        return KNOWN.build("drafter", node, context)

    testing.check_drafter(build)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_targets_own(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family)
    ways: list[dict[str, Any]] = [{}, {"groups": [[0, 1, 2], [4, 5]]}, {"model": model}]
    drafted = taken = 0
    for options, tree in zip(ways, (CHAIN, BRANCHED, BRANCHED), strict=True):
        rounds = testing.lossless_rounds(engine(family, tree, **options), PROMPTS, 20)
        drafted += sum(one.depth for one in rounds)
        taken += testing.accepted(rounds)
    assert 0 < taken < drafted


def test_sampled_output_follows_the_targets_distribution(tmp_path: Path) -> None:
    sampled = {"name": "chain", "depth": 3, "proposal": "sampled"}
    one = engine("llama", sampled, model=saved(tmp_path), calibration="every_mismatch")
    settings = {"samples": 200, "temperature": 1.5, "top_k": 3}
    assert testing.fit(one, [3, 1], generator=torch.Generator().manual_seed(5), **settings) > 0.01


def test_groups_of_one_are_the_target_itself_and_always_right(tmp_path: Path) -> None:
    for options in ({"size": 1}, {"size": 1, "model": saved(tmp_path), "calibration": "never"}):
        rounds = testing.lossless_rounds(engine(**options), PROMPTS, 24)
        assert all(one.accepted == one.depth for one in rounds)


@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_batches_are_lossless_however_the_cache_is_calibrated(
    calibration: str, tmp_path: Path
) -> None:
    one = engine(tree=BRANCHED, model=saved(tmp_path), calibration=calibration)
    plain = [testing.plain_text(target("llama"), prompt, 16) for prompt in PROMPTS]
    together = testing.write_together(one, PROMPTS, 16, batch_size=2)
    assert [text.tokens for text in together] == plain
    alone = [testing.write(one, prompt, 16) for prompt in PROMPTS]
    assert [text.rounds for text in together] == [text.rounds for text in alone]


@pytest.mark.parametrize("on_a_draft_model", [False, True])
def test_compiled_passes_draft_the_same(on_a_draft_model: bool, tmp_path: Path) -> None:
    options = {"model": saved(tmp_path)} if on_a_draft_model else {}
    made, pretend = drafter(**options), Pretend()
    fast_target = target("llama").compiled(lambda line: None, pretend)
    fast = made.compiled(lambda line: None, pretend)
    texts = [
        testing.write(testing.engine(host, one, tree=CHAIN, components=KNOWN), PROMPTS[1], 20)
        for host, one in ((target("llama"), made), (fast_target, fast))
    ]
    assert (texts[0].tokens, texts[0].rounds) == (texts[1].tokens, texts[1].rounds)
    assert any(name.startswith("draft") for name in pretend.names)
    assert any("groups" in name for name in pretend.names) == on_a_draft_model


@pytest.mark.parametrize(
    ("size", "layers", "groups"),
    [
        (4, 30, [range(start, start + 4) for start in range(1, 29, 4)]),
        (4, 8, [range(1, 5), range(5, 7)]),
        (5, 8, [range(1, 6)]),  # the sixth is alone
        (4, 2, []),
        (1, 6, []),
    ],
)
def test_the_first_and_the_last_layer_are_alone_by_default(
    size: int, layers: int, groups: list[range]
) -> None:
    expected = tuple(map(tuple, groups))
    assert groups_of(size, layers) == expected
    assert sum(stages(expected, layers)) == layers
    if size == 4:
        assert plan_of(EasySpecConfig(), layers).groups == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 0}, "drafter.size: is 0"),
        ({"size": 2, "groups": [[1, 2]]}, "drafter.size: excludes groups"),
        ({"groups": [["a"]]}, "drafter.groups"),
        ({"groups": [1, 2]}, "drafter.groups"),
        ({"calibration": "never"}, "drafter.calibration: is that of a draft model"),
        ({"revision": "main"}, "drafter.revision: is that of a draft model"),
        ({"model": "x", "calibration": "sometimes"}, "drafter.calibration: is 'sometimes'"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused_by_name(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fields.options(EasySpecConfig, options, "drafter")


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([[4, LAYERS]], "layers 4, 6 cannot be a group: list consecutive"),
        ([[5, LAYERS]], "layers 5, 6 cannot be a group: .* 0 to 5 alone"),
        ([[-1, 0]], "is -1; it must be at least 0"),
        ([[1, 2], [2, 3]], "layer 2 is in another one"),
        ([[]], "cannot be a group"),
    ],
    ids=str,
)
def test_groups_that_the_model_has_not_are_refused(groups: Any, said: str) -> None:
    with pytest.raises(FalconLabError, match=rf"groups[\[\]\d]*: .*{said}"):
        drafter(groups=groups)
