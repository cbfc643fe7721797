from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_cases import FAMILIES, FOLDER, KNOWN, PROMPTS, drafter, engine, target
from falcon_lab_diffusion import CpsConfig, DiffusionConfig
from falcon_lab_diffusion.masking import Anchors, Noise, block_noise, document_noise
from falcon_lab_diffusion.path_search import PathSearch

from falcon_lab import testing
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, Frontier, Observation, Reveal
from falcon_lab.testing import fit, packed, training_inputs
from falcon_lab.testing.targets import tiny_model, tiny_tokenizer
from falcon_lab.tree import TokenTree

ROOT = Frontier.root(torch.device("cpu"))
CPS = {"name": "cps", "depth": 4, "paths": 2}


def test_the_distribution_is_as_users_expect_one() -> None:
    testing.check_distribution(FOLDER)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("attention", "steps"), [("block", 1), ("block", 3), ("bidirectional", 2)])
def test_greedy_output_is_the_target_s_own(family: str, attention: str, steps: int) -> None:
    model = target(family)
    made = drafter(model, attention=attention, steps=steps)
    for tree in ({"name": "chain", "depth": 4}, CPS):
        controller = {"name": "adl", "least": 2, "most": 4, "step": 1}
        by = engine(model, made, tree=tree, controller=controller)
        rounds = testing.lossless_rounds(by, PROMPTS, 16)
        assert any(one.nodes > 1 for one in rounds)


def test_batches_are_lossless() -> None:
    model = target("llama")
    by = engine(model, drafter(model, steps=2), tree={"name": "chain", "proposal": "sampled"})
    alone = [testing.write(by, prompt, 12).tokens for prompt in PROMPTS]
    together = testing.write_together(by, PROMPTS * 2, 12, batch_size=3)
    assert [one.tokens for one in together] == alone * 2


SAMPLED = {"name": "chain", "depth": 3, "proposal": "sampled"}
FEW = {"samples": 400, "temperature": 0.9}


def p_value(made: Any, tree: Any) -> float:
    model = target(vocab=5)
    by = engine(model, made, tree=tree)
    return fit(by, [3, 1, 4], generator=torch.Generator().manual_seed(6), **FEW)


@pytest.mark.parametrize(
    ("steps", "tree"), [(3, SAMPLED), (1, {"name": "cps", "depth": 3, "mass": 1.0})]
)
def test_sampled_output_follows_the_target_s_distribution(steps: int, tree: Any) -> None:
    made = drafter(target(vocab=5), block=3, steps=steps)
    assert p_value(made, tree) > 0.01


class Soft(PathSearch):
    """Says that its path was drawn from the drafter's distributions."""

    def grow(self, output: Any) -> None:
        self.q = output.logits[0].softmax(-1)
        super().grow(output)

    def finish(self) -> TokenTree:
        tree = super().finish()
        if not tree.drafted:
            return tree
        rows = torch.arange(tree.drafted + 1) - 1
        return replace(tree, proposal="sampled", q=self.q[: tree.drafted], q_row=rows)


def test_a_path_that_was_searched_for_is_no_sample() -> None:
    model = target(vocab=5)
    tree = Soft(CpsConfig(depth=3, mass=1.0), BuildContext(model, 3, 1))
    assert p_value(drafter(model, block=3), tree) < 1e-4


def rows_alone(made: Any, text: list[int], behind: list[int]) -> torch.Tensor:
    """The block's logits, of one text alone; -1 is a mask."""
    tokens = torch.tensor([text + behind])
    mask = torch.ones(1, tokens.shape[1], tokens.shape[1], dtype=torch.bool)
    if made.config.attention != "bidirectional":
        mask[0, : len(text)] = mask[0, : len(text)].tril()
    positions = torch.arange(1, tokens.shape[1] + 1)[None]
    with torch.no_grad():
        states = made.model(tokens, positions, mask)[0]
        found: torch.Tensor = made.model.logits(states[-len(behind) - 1 :])
    return found


@pytest.mark.parametrize("label", ["data", "target"])
def test_the_mdlm_loss_equals_a_direct_computation(label: str) -> None:
    """Of shown and hidden tokens of two blocks, each of which is read alone."""
    model = target("llama")
    made = drafter(model, block=3).train()
    texts = [torch.tensor([7, 3, 1, 4, 1, 5, 9, 2]), torch.tensor([2, 6, 5, 3, 5, 8, 9])]
    batch = packed([texts])
    inputs = training_inputs(model, made, batch, torch.Generator())
    at, real = torch.tensor([[1, 9]]), torch.ones(1, 2, dtype=torch.bool)
    hidden = torch.tensor([[[True, False, True], [False, True, True]]])
    weight = torch.tensor([[[2.0], [5.0]]]).expand(1, 2, 3)
    prediction = made.blocks(inputs, Anchors(at, real), Noise(hidden, weight))

    objective = KNOWN.build(
        "objective", {"name": "mdlm", "label": label}, BuildContext.of(model, made)
    )
    module = testing.distillation(model, made, objective=objective, components=KNOWN)
    with torch.no_grad():
        step = module.step(batch)
        made.forward = lambda *_: prediction  # the blocks above, not drawn ones
        loss, tally = step.train(0.0)

    # The documents' x_{t+1}: of the first 3 1 4 1 5 9 2, of the second 6 5 3 5 8 9.
    expected, total = 0.0, 0.0
    for text, behind, follow, shown, t in (
        ([3, 1], [-1, 1], [4, 1, 5], [True, False, True], 2.0),
        ([6, 5], [3, -1], [3, 5, 8], [False, True, True], 5.0),
    ):
        before = [7 if text[0] == 3 else 2, *text]
        log_q = rows_alone(made, text, behind).log_softmax(-1)
        true = [before[0], *text, *follow]
        logits = model.teacher(
            torch.tensor([true]), torch.zeros(1, 6).long(), torch.arange(6)[None]
        )
        best = model.head(logits)[0].argmax(-1)
        for place, counts in enumerate(shown):
            wanted = follow[place] if label == "data" else int(best[2 + place])
            expected += -t * float(log_q[place, wanted]) * counts
            total += t * counts
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert tally.reduced()["train/loss"][1] == pytest.approx(total)


def test_whole_documents_hide_tokens_anywhere() -> None:
    model = target("llama")
    made = drafter(model, attention="bidirectional").train()
    texts = [torch.tensor([7, 3, 1, 4, 1, 5]), torch.tensor([2, 6, 5, 3])]
    inputs = training_inputs(model, made, packed([texts]), torch.Generator())
    assert inputs.tokens[0, :5].tolist() == [3, 1, 4, 1, 5]
    hidden = torch.zeros_like(inputs.tokens, dtype=torch.bool)
    hidden[0, [1, 2, 4]] = True
    found = made.whole_documents(inputs, Noise(hidden, torch.full(hidden.shape, 4.0)))
    assert found.label[0, :5].tolist() == [1, 2, -1, 4, -1]
    rows = made.model.logits(found.hidden[0, [0, 1, 3]])
    whole = rows_alone(made, [3], [-1, -1, 1, -1])
    torch.testing.assert_close(rows, whole[[0, 1, 3]], rtol=1e-4, atol=1e-4)


def test_noise_is_spread_evenly() -> None:
    generator = torch.Generator().manual_seed(3)
    noise = block_noise((2, 500, 8), generator)
    assert 0.48 < float(noise.hidden.float().mean()) < 0.52
    assert float((noise.hidden * noise.weight).mean()) == pytest.approx(1, abs=0.1)
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, -1]])
    weight = document_noise(documents, generator).weight
    assert len(weight.unique()) == 3 + int(weight[1, 4] not in weight[1, :4])


def test_fixed_tokens_have_all_the_mass() -> None:
    model = target("llama")
    once, often = drafter(model, steps=1), drafter(model, steps=4)
    text = torch.tensor([3, 1, 4, 1, 5])
    rows = []
    for made in (once, often):
        made.reset(text[0])
        made.observe(Observation(text[1:], None))
        rows.append(made.draft(ROOT).logits[0])
    certain = rows[1].isfinite().sum(-1) == 1
    assert int(certain.sum()) == 3
    assert rows[0].isfinite().all()
    surest = int(rows[0].softmax(-1).amax(-1).argmax())
    assert certain[surest]
    assert int(rows[1][surest].argmax()) == int(rows[0][surest].argmax())


@pytest.mark.parametrize("noise", ["mdlm", "none"])
def test_from_distillation_to_decoding(noise: str) -> None:
    """A model that has learnt a target's own texts drafts most of them, and changes nothing."""
    model = testing.tiny_target(vocab=16, layers=2)
    made, texts = drafter(model, stir=0, layers=2, noise=noise, block=3), testing.own_texts(model)
    objective = {"name": "mdlm", "streak": 0.0 if noise == "mdlm" else 0.5}
    module = testing.distillation(
        model, made, objective=objective, components=KNOWN, steps=60, lr=1e-2, noise=0.0
    )
    before, after = testing.distil(module, texts)
    assert after["val/loss"] < 0.8 * before["val/loss"]
    by = engine(model, made, tree={"name": "cps", "depth": 3})
    rounds = testing.lossless_rounds(by, texts[:, :2].tolist(), 20)
    assert testing.accepted(rounds) / len(rounds) > 0.5


def saved(folder: Path, **config: int) -> str:
    """Save a masked model, and return its folder."""
    model = tiny_model("llama", seed=3, vocab=12)
    for name, value in config.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    tiny_tokenizer(12).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("shift", [True, False])
def test_a_pretrained_model_drafts_with_its_own_mask(tmp_path: Path, shift: bool) -> None:
    model, folder = target("gpt2"), saved(tmp_path, mask_token_id=1)
    made = drafter(model, stir=0, model=folder, shift=shift, steps=2)
    assert made.pretrained
    rounds = testing.lossless_rounds(engine(model, made, tree=CPS), PROMPTS, 16)
    assert any(one.nodes > 1 for one in rounds)

    once = drafter(model, stir=0, model=folder, shift=shift)
    once.reset(torch.tensor(3))
    once.observe(Observation(torch.tensor([1, 4]), None))
    tokens = torch.tensor([[3, 1, 4, 1, 1, 1, 1][: 6 + (not shift)]])
    whole = torch.ones(1, tokens.shape[1], tokens.shape[1], dtype=torch.bool)
    with torch.no_grad():
        states = once.model(tokens, torch.arange(tokens.shape[1])[None], whole)[0]
        torch.testing.assert_close(once.draft(ROOT).logits[0], once.model.logits(states[-4:]))

    texts = [torch.tensor([7, 3, 1, 4, 1, 5]), torch.tensor([2, 6, 5, 3])]
    inputs = training_inputs(model, once, packed([texts]), torch.Generator())
    for training in (False, True):
        found = once.train(training)(inputs)
        rows = found.head(found.hidden[0], found.slot[0])
        assert rows.shape == (found.label.shape[1], 12)


def test_a_model_that_does_not_name_its_mask_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    with pytest.raises(FalconLabError, match=r"drafter\.mask_token"):
        drafter(target("llama"), model=folder)
    with pytest.raises(FalconLabError, match="not in the vocabulary"):
        drafter(target("llama"), model=folder, mask_token="<mask>")
    assert drafter(target("llama"), model=folder, mask_token="<unk>").pretrained


def test_what_cannot_be_is_refused() -> None:
    model = target("llama")
    with pytest.raises(FalconLabError, match="layers is 9"):
        drafter(model, layers=9)
    with pytest.raises(ValueError, match="leave out layers"):
        DiffusionConfig(model="a/b", layers=2)
    with pytest.raises(ValueError, match="name the model"):
        DiffusionConfig(mask_token="<mask>")
    made = drafter(model)
    rows = training_inputs(model, made, packed([[torch.arange(1, 9)]]), torch.Generator())
    nothing = torch.zeros(1, 1)
    with pytest.raises(FalconLabError, match=r"glancing\.name=none"):
        made(rows, Reveal(nothing.bool(), nothing.long(), nothing))
