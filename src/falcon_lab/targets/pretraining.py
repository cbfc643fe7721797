"""Targets that are trained from scratch on first use.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from falcon_lab.data.batch import Batch
from falcon_lab.errors import FalconLabError
from falcon_lab.schema import ModelShape, PretrainingConfig
from falcon_lab.targets.backbone import Backbone
from falcon_lab.targets.masks import packed_mask


def build_model(shape: ModelShape, tokenizer: Any, *, seed: int) -> LlamaForCausalLM:
    """A randomly initialised Llama of the given shape with tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def next_token_loss(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """Sum of the next-token cross-entropy in nats, and the number of tokens it is over.

    ``logits`` are ``[B, T, V]``. Tokens count where the mask says so and the token before them is
    of the same document.
    """
    counts = batch.loss_mask[:, 1:] & (batch.documents[:, 1:] == batch.documents[:, :-1])
    loss = F.cross_entropy(
        logits[:, :-1][counts].float(), batch.tokens[:, 1:][counts], reduction="sum"
    )
    return loss, int(counts.sum())


def matrices_and_rest(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's parameter groups: only matrices decay."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


class Pretraining(L.LightningModule):
    """Next-token training of a target on packed documents."""

    def __init__(self, model: LlamaForCausalLM, recipe: PretrainingConfig) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe
        # A view on the same weights; a tuple, so that they are not registered a second time.
        self._backbone = (Backbone(model.base_model),)
        self.save_hyperparameters({"recipe": asdict(recipe)})

    def loss_of(self, batch: Batch) -> tuple[Tensor, int]:
        """Summed loss of a batch and the tokens it is over."""
        hidden = self._backbone[0](
            tokens=batch.tokens,
            positions=batch.positions,
            mask=packed_mask(batch.documents),
        )
        return next_token_loss(self.model.lm_head(hidden), batch)

    def training_step(self, batch: Batch, _: int) -> Tensor:
        """One batch; stops the run when the loss is no number any more."""
        total, count = self.loss_of(batch)
        loss = total / max(count, 1)
        if not math.isfinite(loss.item()):
            raise FalconLabError(
                f"target pre-training: the loss is {loss.item()} at step {self.global_step}; "
                f"lower target.pretraining.lr (now {self.recipe.lr:g})"
            )
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, linear warm-up, then cosine to nothing."""
        recipe = self.recipe
        optimizer = torch.optim.AdamW(
            matrices_and_rest(self.model, recipe.weight_decay), lr=recipe.lr, betas=(0.9, 0.95)
        )

        def factor(step: int) -> float:
            if step < recipe.warmup_steps:
                return (step + 1) / recipe.warmup_steps
            progress = (step - recipe.warmup_steps) / max(recipe.steps - recipe.warmup_steps, 1)
            return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
