"""Law 1 where a drafter cannot say what the target is likely to: drafts of a few tokens alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from falcon_lab.config.schema import Experiment
from falcon_lab.distill.stage import build_drafter
from falcon_lab.drafters.saved import load_drafter, save_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext
from falcon_lab.model.target import Target
from falcon_lab.plugins.discovery import load_components
from falcon_lab.testing import (
    TREES,
    accepted,
    engine,
    fit,
    lossless_rounds,
    plain_text,
    write,
    write_together,
)
from tiny_models import tiny_target

V, SIZE = 12, 6
PROMPTS = ([5], [7, 9, 3], [2, 8, 2, 8, 2, 4, 11, 6])
NODE = {"name": "falcon", "block": 2, "draft_vocabulary": SIZE}
ORIGIN = {"name": "falcon", "distribution": "falcon-lab", "version": "0"}


def occurrences(target: Target) -> torch.Tensor:
    """How often the target writes each of its tokens."""
    texts = torch.tensor([plain_text(target, prompt) for prompt in PROMPTS])
    return torch.bincount(texts.flatten(), minlength=V)


def drafter(target: Target, counts: torch.Tensor, **options: Any) -> Any:
    torch.manual_seed(3)
    context = BuildContext(target, token_counts=lambda: counts)
    return load_components().build("drafter", {**NODE, **options}, context).eval()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_greedy_text_is_the_targets_with_and_without_its_likely_tokens(family: str) -> None:
    target = tiny_target(family, vocab=V)
    often = occurrences(target)
    for counts in (often, -often):
        made = drafter(target, counts)
        known, rounds = set(made.draft_vocabulary.ids.tolist()), []

        def drafted(*given: Any, known: set[int] = known) -> None:
            tree = given[2]
            assert tree is None or known >= set(tree.tokens[1:].tolist())

        for tree in TREES.values():
            decoding = engine(target, made, tree=tree)
            rounds += lossless_rounds(decoding, PROMPTS)
        write(decoding, PROMPTS[1], 8, on_round=drafted)
        together = write_together(decoding, PROMPTS, 8)
        assert [one.tokens for one in together] == [plain_text(target, p, 8) for p in PROMPTS]
        assert accepted(rounds) or counts is not often, "no draft token was ever accepted"


@pytest.mark.parametrize(
    "tree",
    [
        {"name": "chain", "depth": 3, "proposal": "sampled"},
        {"name": "static", "template": {"": 3, "0": 2, "00": 1}, "proposal": "sampled"},
    ],
    ids=lambda tree: tree["name"],
)
def test_sampled_text_follows_the_target_without_its_likely_tokens(tree: dict[str, Any]) -> None:
    target, sampling = tiny_target(vocab=V), {"temperature": 2.0, "top_k": 3}
    likely = torch.zeros(V, dtype=torch.long)
    drawn = torch.Generator().manual_seed(1)
    for _ in range(40):
        text = plain_text(target, PROMPTS[1], 3, generator=drawn, **sampling)
        likely += torch.bincount(torch.tensor(text), minlength=V)
    made = drafter(target, -likely)
    missing = [token for token in range(V) if token not in made.draft_vocabulary.ids.tolist()]
    assert likely[missing].sum() > 0.5 * likely.sum()
    generator = torch.Generator().manual_seed(5)
    decoding = engine(target, made, tree=tree)
    assert fit(decoding, PROMPTS[1], samples=100, generator=generator, **sampling) > 0.01


def save(folder: Path, target: Target) -> Any:
    made = drafter(target, torch.arange(V))
    save_drafter(folder, made, node=NODE, provenance=ORIGIN, target=target, card="")
    return made


def test_it_is_saved_with_its_tokens(tmp_path: Path) -> None:
    target = tiny_target(vocab=V)
    made = save(tmp_path / "drafter", target)
    loaded = load_drafter(tmp_path / "drafter", target, load_components())
    assert loaded.draft_vocabulary.ids.tolist() == [0, 1, 8, 9, 10, 11]
    for tree in TREES.values():
        texts = [write(engine(target, each, tree=tree), PROMPTS[2], 16) for each in (made, loaded)]
        assert texts[0].rounds == texts[1].rounds


def test_another_vocabulary_is_refused_whatever_is_forced(tmp_path: Path) -> None:
    target, folder = tiny_target(vocab=V), tmp_path / "drafter"
    save(folder, target)
    with pytest.raises(FalconLabError, match="some of the 12 tokens of tiny-llama"):
        load_drafter(folder, tiny_target(vocab=20), load_components(), force=True)
    config = json.loads((folder / "config.json").read_text())
    config["target"]["vocab_size"] = None
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FalconLabError, match=r"model.safetensors: .*token 11.*0 to 9"):
        load_drafter(folder, tiny_target(vocab=10), load_components(), force=True)


def test_the_training_chooses_the_tokens_of_its_data() -> None:
    target, counts = tiny_target(vocab=V), torch.arange(V)
    experiment = Experiment(drafter=dict(NODE))
    made = build_drafter(experiment, target, load_components(), lambda: counts)
    assert made.draft_vocabulary.ids.tolist() == [0, 1, 8, 9, 10, 11]
    before = build_drafter(experiment, target, load_components())  # where there are no data yet
    assert before.draft_vocabulary.ids.tolist() == [0, 1, 2, 3, 4, 5]


def test_too_few_tokens_are_refused_by_the_options_name() -> None:
    target = tiny_target(vocab=V)
    with pytest.raises(FalconLabError, match=r"draft_vocabulary is 1, .* 2 special tokens"):
        drafter(target, torch.zeros(V), draft_vocabulary=1)
