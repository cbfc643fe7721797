"""What Hydra's heads draft, and how they learn it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from falcon_lab_hydra import HydraConfig
from falcon_lab_hydra.hydra import HydraDrafter
from hydra_cases import FOLDER, KNOWN, drafter, engine, inputs, target, text
from omegaconf import OmegaConf
from torch import nn

from falcon_lab import testing
from falcon_lab.drafters.saved import load_drafter, save_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, Frontier, Observation
from falcon_lab.testing.compiling import Pretend

ROOT = Frontier.root(torch.device("cpu"))
PLUS: dict[str, Any] = {"layers": 2, "prefix": True, "heads": 3}
RECIPES = re.findall(r"```yaml\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
CHAIN = {"name": "chain", "depth": 4}


def test_the_distribution_is_as_users_expect_one() -> None:
    testing.check_distribution(FOLDER)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_the_readme_decodes(recipe: str) -> None:
    node: Any = OmegaConf.to_container(OmegaConf.create(recipe))
    made = testing.build_drafter(target(), node["drafter"], components=KNOWN, stir=0.2)
    by = engine(target(), made, tree=node["tree"])
    testing.lossless_rounds(by, [[3, 1, 4]], 12)


@torch.no_grad()
def test_head_i_reads_the_feature_and_the_tokens_of_its_own_path() -> None:
    """Written out, for two branches of unequal tokens below unequal parents."""
    made, features, tokens = drafter("hydra"), torch.randn(3, 32), text(3)
    made.observe(Observation(tokens, features))
    first = made.draft(ROOT)
    embed = made.host.embed

    def by_hand(*path: int) -> torch.Tensor:
        number, layer = len(path), made.trunks[len(path)][0]
        rows = torch.cat([features[-1], embed(tokens[-1]), *map(embed, torch.tensor(path))])
        silu = torch.nn.functional.silu(layer.linear(rows))
        return made.heads[number](layer.residual(rows) + silu)

    torch.testing.assert_close(first.logits[0, 0], by_hand())
    below = made.draft(Frontier(torch.tensor([[5], [7]]), torch.tensor([0, 0])))
    torch.testing.assert_close(below.logits[:, 0], torch.stack([by_hand(5), by_hand(7)]))
    deeper = made.draft(Frontier(torch.tensor([[2], [2], [9]]), torch.tensor([1, 0, 1])))
    expected = torch.stack([by_hand(7, 2), by_hand(5, 2), by_hand(7, 9)])
    torch.testing.assert_close(deeper.logits[:, 0], expected)


@pytest.mark.parametrize("head", ["own", "shared"])
def test_untrained_heads_all_say_what_the_target_says(head: str) -> None:
    made, features = drafter("hydra", stir=0, head=head, layers=2), torch.randn(2, 32)
    made.observe(Observation(text(2), features))
    expected = made.host.head(features[-1:])
    for frontier in (ROOT, *[Frontier(torch.tensor([[4]]), torch.tensor([0]))] * 3):
        torch.testing.assert_close(made.draft(frontier).logits[0], expected)


@torch.no_grad()
def test_the_prefix_layer_reads_the_whole_text() -> None:
    made, given = drafter("hydra", **PLUS), inputs(drafter("hydra", **PLUS), 9)
    made.observe(Observation(given.tokens[0, :4], given.features[0, :4]))
    made.draft(ROOT)
    made.observe(Observation(given.tokens[0, 4:], given.features[0, 4:]))
    drafted = made.draft(ROOT).logits[0, 0]
    trained = made(given)
    torch.testing.assert_close(drafted, made.heads[0](trained.hidden[0, -1]))
    changed = given.features.clone()
    changed[0, 0] += 1
    other = inputs(made, 9)
    object.__setattr__(other, "features", changed)
    assert not torch.allclose(made(other).hidden[0, -1], trained.hidden[0, -1])


def test_more_passes_than_heads_are_refused_with_what_to_set() -> None:
    made = drafter("hydra", heads=2)
    assert len(list(made.unroll(inputs(made, 8)))) == 2
    with pytest.raises(FalconLabError, match=r"set distillation\.unroll=2"):
        testing.distillation(made.host, made, components=KNOWN, unroll=3)


def test_it_has_the_weights_of_the_official_heads_for_vicuna_7b() -> None:
    wide, vocabulary = 4096, 32000
    host: Any = SimpleNamespace(hidden_size=wide, max_positions=2048)
    host.copy_head = lambda: nn.Linear(wide, vocabulary, bias=False)
    with torch.device("meta"):
        made = HydraDrafter(HydraConfig(), BuildContext(host))
    counted = sum(weight.numel() for weight in made.parameters())
    mixes = sum(2 * (head + 2) * wide * wide + wide for head in range(4))
    assert counted == mixes + 4 * wide * vocabulary


def test_what_is_saved_drafts_the_same(tmp_path: Path) -> None:
    options = {**PLUS, "draft_vocabulary": 8, "head": "shared"}
    made, node = drafter("hydra", **options), {"name": "hydra", **options}
    known = KNOWN.provenance("drafter", node)
    save_drafter(tmp_path / "it", made, node=node, provenance=known, target=target(), card="")
    again = load_drafter(tmp_path / "it", target(), KNOWN)
    seen = Observation(text(3), torch.randn(3, 32))
    for one in (made, again):
        one.observe(seen)
    assert torch.equal(made.draft(ROOT).logits, again.draft(ROOT).logits)


def test_sampled_text_follows_the_target_s_distribution() -> None:
    host = testing.tiny_target(vocab=5)
    tree = {"name": "static", "template": {"": 3, "0": 2, "1": 1}, "proposal": "sampled"}
    by, generator = engine(host, drafter("hydra", host, **PLUS), tree=tree), torch.Generator()
    settings = {"samples": 300, "temperature": 0.8, "top_p": 0.95}
    assert testing.fit(by, [3, 1, 4], generator=generator.manual_seed(5), **settings) > 0.01


def test_from_distillation_to_decoding() -> None:
    """Heads that have learnt a target's own texts draft most of them, and change nothing."""
    model = target(vocab=16)
    made, texts = drafter("hydra", model, stir=0, heads=3), testing.own_texts(model)
    objective = {"name": "falcon", "feature": 0.0, "soft": 1.0, "hard": 0.0}
    module = testing.distillation(
        model, made, objective=objective, components=KNOWN, steps=60, lr=1e-2, noise=0.0, unroll=3
    )
    before, after = testing.distil(module, texts)
    assert after["val/loss"] < before["val/loss"]
    compiler = Pretend()
    fast = engine(model, made.compiled(lambda line: None, compiler), tree=CHAIN)
    rounds = testing.lossless_rounds(fast, texts[:, :2].tolist(), 20)
    assert testing.accepted(rounds) / len(rounds) > 1.0
    assert {name.rpartition("-head-")[2][0] for name in compiler.names} == set("012")
