from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from falcon_lab.interfaces import TargetContext, TargetTuner, TuningBatch
from falcon_lab.testing import ContractError, check_tuner


class NextTokens(TargetTuner):
    """Trains everything on next tokens, as it should."""

    def __init__(self, context: TargetContext) -> None:
        pass

    def begin(self, model: Any, tokenizer: Any) -> nn.Module:
        self.model: Any = model.requires_grad_(True)
        module: nn.Module = model
        return module

    def losses(self, batch: TuningBatch) -> Mapping[str, tuple[Tensor, int]]:
        counts = batch.loss_mask[:, 1:] & (batch.documents[:, 1:] == batch.documents[:, :-1])
        logits = self.model(input_ids=batch.tokens).logits[:, :-1][counts]
        loss = nn.functional.cross_entropy(logits, batch.tokens[:, 1:][counts], reduction="sum")
        return {"next": (loss, int(counts.sum()))}

    def finish(self) -> Any:
        return self.model.requires_grad_(False)


class Frozen(NextTokens):
    def begin(self, model: Any, tokenizer: Any) -> nn.Module:
        return super().begin(model, tokenizer).requires_grad_(False)


class Idle(NextTokens):
    def begin(self, model: Any, tokenizer: Any) -> nn.Module:
        super().begin(model, tokenizer)
        return nn.ModuleList([model, nn.Linear(2, 2)])


class Drawing(NextTokens):
    """Draws from torch's global generator."""

    def losses(self, batch: TuningBatch) -> Mapping[str, tuple[Tensor, int]]:
        loss, count = super().losses(batch)["next"]
        return {"next": (loss * (1 + torch.rand(())), count)}


class Padded(NextTokens):
    """Counts padding."""

    def losses(self, batch: TuningBatch) -> Mapping[str, tuple[Tensor, int]]:
        everything = torch.ones_like(batch.loss_mask)
        loss = nn.functional.cross_entropy(
            self.model(input_ids=batch.tokens).logits[:, :-1].flatten(0, 1),
            batch.tokens[:, 1:].flatten(),
            reduction="sum",
        )
        return {"next": (loss, int(everything.sum()))}


class Rising(NextTokens):
    def losses(self, batch: TuningBatch) -> Mapping[str, tuple[Tensor, int]]:
        loss, count = super().losses(batch)["next"]
        return {"next": (2 * loss.detach() - loss, count)}


class Changing(NextTokens):
    """Changes the model before anything is trained."""

    def begin(self, model: Any, tokenizer: Any) -> nn.Module:
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(0.5)
        return super().begin(model, tokenizer)


class Unmerged(NextTokens):
    """Leaves a part of what was trained out of the model that is saved."""

    def begin(self, model: Any, tokenizer: Any) -> nn.Module:
        self.bias = nn.Parameter(torch.zeros(()))
        model.lm_head.register_forward_hook(lambda module, given, out: out * (1 + self.bias))
        module = super().begin(model, tokenizer)
        module.register_parameter("bias", self.bias)
        return module


def test_a_tuner_that_keeps_its_promises_passes() -> None:
    check_tuner(NextTokens)


@pytest.mark.parametrize(
    ("tuner", "what"),
    [
        (Frozen, "weights that are trained"),
        (Idle, "weights that the loss reaches"),
        (Drawing, "the same batch"),
        (Padded, "padding"),
        (Rising, "the loss after"),
        (Changing, "untrained model"),
        (Unmerged, "saving and loading"),
    ],
    ids=lambda value: getattr(value, "__name__", "").lower(),
)
def test_a_planted_defect_is_found(tuner: type[NextTokens], what: str) -> None:
    with pytest.raises(ContractError, match=what):
        check_tuner(tuner)
