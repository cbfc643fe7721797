"""The check of a tuner, which makes a target of another one."""

from __future__ import annotations

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from falcon_lab.config.schema import TargetConfig
from falcon_lab.interfaces import TargetContext, TargetTuner, TuningBatch
from falcon_lab.model.loading import load_target
from falcon_lab.model.target import Target
from falcon_lab.testing.targets import packed, tiny_target
from falcon_lab.testing.tested import ComponentUnderTest, Recipe

POSITIONS = 512
"""Of the tiny target: as many as the default length of a tuner's sequences wants, and more."""

STEPS, LR = 12, 3e-3
"""Of the training that must lower the loss."""

CLOSE = 1e-4
"""How near logits are that should be the same."""


def check_tuner(tuner: Recipe, *, seed: int = 0) -> None:
    """Check that a tuner does what its kind requires.

    - It trains some weights, the same ones of every copy of a model, and a loss reaches each.
    - The same batch and generator give the same loss; padding has no part in it; a few steps
      lower it.
    - What ``finish`` gives is the model as it was where nothing was trained, and what was trained
      otherwise: it is saved, loaded as a target, and says the same.
    - Its tokenizer reads a text as before.

    Args:
        tuner: a YAML node, or what builds a tuner from a ``TargetContext``.
        seed: of everything random.

    Raises:
        ContractError: it does not.
    """
    tested = ComponentUnderTest("tuner", tuner, seed)
    parent = tiny_target(vocab=24, positions=POSITIONS)
    with tested.checking("a stand-in"):
        check_untrained(tested, parent)
    with tested.checking("training"):
        check_training(tested, parent)


def copies(parent: Target) -> tuple[Any, Any]:
    """Return a model and a tokenizer of one's own."""
    return copy.deepcopy(parent.model), copy.deepcopy(parent.tokenizer)


def made(tested: ComponentUnderTest) -> TargetTuner:
    """Build the tuner."""
    found: TargetTuner = tested.build(TargetContext(lambda line: None))
    return found


def said(model: Any, tokens: Tensor, vocabulary: int) -> Tensor:
    """Return the logits of a text, of the tokens that the parent knows."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens[None]).logits[0, :, :vocabulary]
    return logits


def check_untrained(tested: ComponentUnderTest, parent: Target) -> None:
    """Check what comes of a model that is not trained in between."""
    (model, tokenizer), tuner = copies(parent), made(tested)
    words = tokenizer.get_vocab()
    tuner.begin(model, tokenizer)
    text = torch.arange(1, 20)
    before = said(parent.model, text, parent.vocab_size)
    tested.expect(
        torch.allclose(said(tuner.finish(), text, parent.vocab_size), before, atol=CLOSE),
        "what an untrained model says",
        expected="what its parent says",
        found="something else",
        fix="begin with additions that change nothing",
    )
    after = tokenizer.get_vocab()
    tested.expect(
        all(after.get(word) == token for word, token in words.items()),
        "the tokens of the tokenizer",
        expected="as they were, and perhaps more",
        found="others",
        fix="add tokens behind those that are there",
    )


def batch_of(tested: ComponentUnderTest, number: int = 0) -> TuningBatch:
    """Return packed texts with padding at the end, and a fresh generator."""
    draws = tested.generator(1)
    texts = [torch.randint(1, 20, (n,), generator=draws) for n in (9, 14, 11, 8, 4)]
    batch = packed([texts[:2], texts[2:]])
    padding = batch.documents == 2
    return TuningBatch(
        batch.tokens,
        batch.loss_mask & ~padding,
        batch.documents.masked_fill(padding, -1),
        batch.positions,
        tested.generator(number),
    )


def check_training(tested: ComponentUnderTest, parent: Target) -> None:
    """Check the loss, its gradients and what is saved."""
    (model, tokenizer), tuner = copies(parent), made(tested)
    trained = tuner.begin(model, tokenizer)
    weights = check_weights(tested, parent, trained)
    first = check_loss(tested, tuner)
    start = float(first.detach())
    first.backward()
    idle = [name for name, weight in weights.items() if weight.grad is None]
    tested.expect(
        not idle,
        "weights that the loss reaches",
        expected="all that are trained",
        found=f"none of {', '.join(idle[:3])}",
        fix="take requires_grad from what is not to be trained",
    )
    optimizer = torch.optim.AdamW(weights.values(), lr=LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        mean_loss(tuner, batch_of(tested)).backward()
        optimizer.step()
    last = float(mean_loss(tuner, batch_of(tested)).detach())
    tested.expect(
        last < start,
        f"the loss after {STEPS} steps",
        expected=f"less than {start:.4f}",
        found=f"{last:.4f}",
        fix="return sums that the trained weights can lower",
    )
    check_saved(tested, tuner.finish().eval(), tokenizer)


def check_weights(
    tested: ComponentUnderTest, parent: Target, trained: nn.Module
) -> dict[str, nn.Parameter]:
    """Return the trained weights, the same ones of another copy."""
    weights = {name: w for name, w in trained.named_parameters() if w.requires_grad}
    again = made(tested).begin(*copies(parent))
    shapes = [
        {name: tuple(w.shape) for name, w in module.named_parameters() if w.requires_grad}
        for module in (trained, again)
    ]
    tested.expect(
        weights and shapes[0] == shapes[1],
        "the weights that are trained",
        expected="some, and the same of every copy of a model",
        found=f"{len(shapes[0])}, then {len(shapes[1])}",
        fix="a resumed training finds them by their names",
    )
    return weights


def mean_loss(tuner: TargetTuner, batch: TuningBatch) -> Tensor:
    """Return the loss of a batch, as the training does."""
    terms = tuner.losses(batch).values()
    return torch.stack([total for total, _ in terms]).sum() / max(1, sum(n for _, n in terms))


def check_loss(tested: ComponentUnderTest, tuner: TargetTuner) -> Tensor:
    """Return the loss of a batch, which is finite, repeatable and blind to padding."""
    batch = batch_of(tested)
    first = mean_loss(tuner, batch)
    tested.expect(
        bool(first.isfinite()),
        "the loss",
        expected="a finite number",
        found=first.item(),
        fix="count only rows that have a label",
    )
    again = batch_of(tested)
    padding = again.documents < 0
    again.tokens[padding] = 7
    second = mean_loss(tuner, again)
    tested.expect(
        torch.isclose(first, second, atol=CLOSE),
        "the loss of the same batch with other padding",
        expected=first.item(),
        found=second.item(),
        fix="draw from batch.generator alone, and let padding neither be attended to nor count",
    )
    return first


def check_saved(tested: ComponentUnderTest, model: Any, tokenizer: Any) -> None:
    """Check that a tuned model is an ordinary one."""
    text = torch.arange(1, 20)
    before = said(model, text, 20)
    with TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        model.save_pretrained(place)
        loaded = load_target(TargetConfig(name=str(Path(place)), device="cpu", dtype="float32"))
    tested.expect(
        torch.allclose(said(loaded.model, text, 20), before, atol=CLOSE),
        "what the tuned model says after saving and loading",
        expected="what it said before",
        found="something else",
        fix="let finish merge all that was trained into the model's own weights",
    )
