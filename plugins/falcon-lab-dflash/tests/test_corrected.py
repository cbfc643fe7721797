"""DSpark's and Domino's corrections, and JetSpec's causal blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_cases import FAMILIES, KNOWN, SPLIT, WHOLE, engine, inputs, seen, target
from falcon_lab_dflash import DominoConfig, DSparkConfig
from falcon_lab_dflash.corrected import DominoDrafter, DSparkDrafter
from torch.nn import functional
from transformers import LlamaConfig

from falcon_lab import testing
from falcon_lab.interfaces import BuildContext, Frontier
from falcon_lab.testing.compiling import Pretend, Repeating

ROOT = Frontier.root(torch.device("cpu"))
HEADS: dict[str, dict[str, Any]] = {
    "dspark": {"rank": 8},
    "domino": {"rank": 8, "state": 16},
    "dflash": {"causal": True},
}
OBJECTIVE = {
    "name": "falcon",
    "feature": 0.0,
    "soft": 0.9,
    "soft_form": "l1",
    "hard": 0.1,
    "hard_label": "data",
}


def drafter(name: str, family: str = "llama", **options: Any) -> Any:
    node = {"name": name, "block": 3, "layers": 1, **HEADS[name], **options}
    return testing.build_drafter(target(family), node, components=KNOWN, seed=1, stir=0.2)


@torch.no_grad()
@pytest.mark.parametrize("name", ["dspark", "domino"])
def test_a_place_is_corrected_by_the_tokens_of_its_own_path(name: str) -> None:
    """Written out, for two branches of unequal tokens below unequal parents."""
    made = drafter(name)
    rows = inputs(target(), made, *WHOLE)
    made.observe(seen(rows, 0, 0, 6))
    first = made.draft(ROOT)
    said, features = made._said
    root = int(rows.tokens[0, 5])

    def by_hand(*path: int) -> torch.Tensor:
        place, tokens = len(path), torch.tensor([root, *path])
        if name == "dspark":
            return said[place] + made.after(made.before(tokens[-1]))
        state = torch.zeros(1, 16)
        for embedded in made.host.embed(tokens):
            state = made.path(embedded[None], state)
        both = torch.cat([features[place], state[0]])
        return said[place] + made.up(functional.silu(made.down(both)))

    torch.testing.assert_close(first.logits[0, 0], by_hand())
    below = made.draft(Frontier(torch.tensor([[5], [7]]), torch.tensor([0, 0])))
    torch.testing.assert_close(below.logits[:, 0], torch.stack([by_hand(5), by_hand(7)]))
    deeper = made.draft(Frontier(torch.tensor([[2], [2], [9]]), torch.tensor([1, 0, 1])))
    expected = torch.stack([by_hand(7, 2), by_hand(5, 2), by_hand(7, 9)])
    torch.testing.assert_close(deeper.logits[:, 0], expected)
    assert made.draft(Frontier(torch.tensor([[1]]), torch.tensor([0]))).logits.shape[1] == 0


@torch.no_grad()
def test_places_of_a_causal_block_do_not_see_those_behind_them() -> None:
    """So a shorter block of the same weights says the same."""
    long, short = drafter("dflash"), drafter("dflash", block=1)
    short.load_state_dict(long.state_dict())
    rows = inputs(target(), long, *SPLIT)
    outputs = []
    for made in (long, short):
        made.observe(seen(rows, 0, 0, 6))
        outputs.append(made.draft(ROOT).logits[0, 0])
    torch.testing.assert_close(*outputs)
    anchors = torch.tensor([[2, 9], [1, 12]])
    trained = [made.predict(rows, anchors).features for made in (long, short)]
    torch.testing.assert_close(trained[0][:, ::3], trained[1])
    both_ways = drafter("dflash", causal=False)
    both_ways.load_state_dict(long.state_dict())
    assert not torch.allclose(both_ways.predict(rows, anchors).features[:, ::3], trained[1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", HEADS)
def test_greedy_text_through_compiled_passes_and_graphs_is_the_target_s(
    name: str, family: str
) -> None:
    made, tree = drafter(name, family), {"name": "dynamic", "nodes": 8, "width": 3}
    compiler, recorder = Pretend(), Repeating()
    for fast in (
        made.compiled(lambda line: None, compiler),
        made.compiled(lambda line: None, recorder=recorder),
    ):
        by = engine(target(family), fast, tree=tree)
        testing.lossless_rounds(by, [[5], [3, 1, 4, 1]], 16)
    assert compiler.calls > 0
    assert recorder.replays > 0


def test_it_has_the_weights_of_the_official_heads_beside_dflash_s() -> None:
    wide, vocabulary, rank, state = 2560, 151_936, 256, 1024
    qwen = LlamaConfig(
        hidden_size=wide, intermediate_size=9728, num_attention_heads=32, num_hidden_layers=36
    )
    host: Any = SimpleNamespace(
        hidden_size=wide, config=qwen, vocab_size=vocabulary, max_positions=4096
    )
    counts = []
    with torch.device("meta"):
        for kind, config in (
            (DSparkDrafter, DSparkConfig()),
            (DominoDrafter, DominoConfig(state=state)),
        ):
            made: Any = kind(config, BuildContext(host))  # type: ignore[arg-type]
            inner = sum(weight.numel() for weight in made.model.parameters()) + wide
            counts.append(sum(weight.numel() for weight in made.parameters()) - inner)
    gru = 3 * state * (wide + state)
    assert counts == [2 * vocabulary * rank, gru + (wide + state) * rank + rank * vocabulary]


def test_from_distillation_to_decoding() -> None:
    model, name = target(vocab=16), "domino"
    node = {"name": name, "block": 3, "layers": 1, "anchors": 12, **HEADS[name]}
    made = testing.build_drafter(model, node, components=KNOWN, seed=1)
    texts = testing.own_texts(model)
    module = testing.distillation(
        model, made, objective=OBJECTIVE, components=KNOWN, steps=60, lr=5e-3, unroll=3
    )
    before, after = testing.distil(module, texts)
    assert after["val/loss"] < before["val/loss"]
    by = engine(model, made, tree={"name": "chain", "depth": 3})
    rounds = testing.lossless_rounds(by, texts[:, :2].tolist(), 20)
    assert testing.accepted(rounds) / len(rounds) > 1.2


@pytest.mark.parametrize("name", ["dspark", "domino"])
def test_a_block_has_as_many_passes_as_places(name: str) -> None:
    made = drafter(name)
    rows = inputs(target(), made, *WHOLE)
    labels = [each.label - each.source for each in made.unroll(rows)]
    assert [set(label.flatten().tolist()) for label in labels] == [{1}, {2}, {3}]
