from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from falcon_lab import testing
from falcon_lab.drafters.saved import load_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.export.generate import Speculation
from falcon_lab.plugins.discovery import load_components
from saved_models import save_untrained
from tiny_models import save_tiny, tiny_tokenizer

TREES = (
    ["tree.name=chain", "tree.depth=3"],
    ["tree.name=dynamic", "tree.nodes=8", "tree.beam=3", "tree.width=3", "tree.depth=4"],
)
PROMPTS = [[5, 9, 13, 21, 8], [7, 3, 30]]
NEW = 20


class Model:
    """A tiny model of transformers, loaded as users do, and a drafter for it."""

    def __init__(self, folder: Path) -> None:
        from falcon_lab.config.schema import TargetConfig
        from falcon_lab.model.loading import load_target

        save_tiny(folder / "target")
        self.target = load_target(TargetConfig(name=str(folder / "target"), device="cpu"))
        self.drafter = save_untrained(folder / "drafter", self.target, load_components())
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder / "target")

    def speculation(self, *overrides: str) -> Speculation:
        return Speculation(str(self.drafter), *overrides, tokenizer=tiny_tokenizer(64))

    def generate(self, tokens: Tensor, **more: Any) -> Tensor:
        settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 1, **more}
        return self.model.generate(tokens, pad_token_id=0, **settings)


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("generate"))


@pytest.mark.parametrize("tree", TREES, ids=["chain", "dynamic"])
def test_texts_are_the_models_and_rounds_those_of_our_engine(it: Model, tree: list[str]) -> None:
    speculation = it.speculation(*tree)
    loaded = load_drafter(it.drafter, it.target, load_components())
    node = {k.split(".")[1]: v for k, v in (word.split("=") for word in tree)}
    node = {k: int(v) if v.isdigit() else v for k, v in node.items()}
    ours = testing.engine(it.target, loaded, tree=node, components=load_components())
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        plain = it.generate(tokens)
        assert it.generate(tokens, custom_generate=speculation).tolist() == plain.tolist()
        [found] = speculation.generations
        expected = testing.write(ours, prompt, NEW, ends=[1])
        assert found.tokens == expected.tokens
        assert len(found.rounds) == len(expected.rounds)


def test_padded_prompts_of_a_batch_are_continued_side_by_side(it: Model) -> None:
    tokens = torch.tensor([PROMPTS[0], [0, 0, *PROMPTS[1]]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    found = it.generate(tokens, attention_mask=mask, custom_generate=it.speculation(*TREES[0]))
    alone = [it.generate(torch.tensor([prompt]))[0, len(prompt) :] for prompt in PROMPTS]
    for row, text in zip(found[:, 5:], alone, strict=True):
        assert row[: len(text)].tolist() == text.tolist()
        assert not row[len(text) :].any()


def test_sampled_texts_are_drawn_with_the_models_settings(it: Model) -> None:
    torch.manual_seed(3)
    settings = {"do_sample": True, "top_k": 1, "temperature": 0.7}  # one token is left
    tokens = torch.tensor([PROMPTS[0]])
    found = it.generate(tokens, custom_generate=it.speculation(*TREES[0]), **settings)
    assert found.tolist() == it.generate(tokens).tolist()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"repetition_penalty": 1.3}, "RepetitionPenalty"),
        ({"num_beams": 2}, "num_beams"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"max_time": 3.0}, "MaxTime"),
    ],
)
def test_what_it_does_not_do_is_refused(it: Model, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(FalconLabError, match=said):
        it.generate(
            torch.tensor([PROMPTS[0]]), custom_generate=it.speculation(*TREES[0]), **settings
        )


def test_a_drafter_of_another_model_is_refused(it: Model, tmp_path: Path) -> None:
    save_tiny(tmp_path / "other", layers=3)
    other: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    with pytest.raises(FalconLabError, match="trained for"):
        other.generate(torch.tensor([PROMPTS[0]]), custom_generate=it.speculation(), pad_token_id=0)
