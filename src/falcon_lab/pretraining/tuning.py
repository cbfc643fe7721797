"""Tuning: the training that makes a target of another one, and what it is measured by.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from falcon_lab.config.saved import CHECKPOINTS, HISTORY
from falcon_lab.config.schema import DataConfig, OptimizerConfig
from falcon_lab.data.datamodule import FalconDataModule
from falcon_lab.data.dialogue_card import refuse_other_author
from falcon_lab.data.packing import Batch
from falcon_lab.errors import FalconLabError
from falcon_lab.files import make_folder
from falcon_lab.history import HistoryLogger
from falcon_lab.interfaces import TargetTuner, TuningBatch
from falcon_lab.model.masks import packed_mask
from falcon_lab.model.memory import free_memory, gib
from falcon_lab.model.target import Target
from falcon_lab.plugins.hooks import TuningOptions
from falcon_lab.pretraining.training import next_token_loss, save_whole
from falcon_lab.pretraining.tuned import Parent, Tuning, options_of
from falcon_lab.timing import Stopwatch
from falcon_lab.training import make_optimizer, train

BYTES = 16
"""Of a trained weight: itself, its gradient, and two moments of AdamW, in float32."""

LOG_EVERY = 5
"""Steps between two points of the curve."""

FINAL_LR = 0.05
"""Share of the learning rate at the last step."""


class TargetTuning(L.LightningModule):
    """Trains what a tuner says.

    A checkpoint has the trained weights alone; the others are the parent's.

    Args:
        tuner: gives the terms of the loss.
        trained: the module that its ``begin`` returned.
        options: of the training.
    """

    strict_loading = False

    def __init__(self, tuner: TargetTuner, trained: nn.Module, options: TuningOptions) -> None:
        super().__init__()
        self.trained = trained
        self.tuner = tuner
        self.options = options

    def state_dict(  # type: ignore[override]
        self, *arguments: Any, **settings: Any
    ) -> dict[str, Any]:
        """Return the trained weights."""
        wanted = {name for name, weight in self.named_parameters() if weight.requires_grad}
        whole = super().state_dict(*arguments, **settings)
        return {name: value for name, value in whole.items() if name in wanted}

    def training_step(self, batch: Batch, _: int) -> Tensor:
        """Return the mean loss of a batch; stop the run where it is not finite."""
        generator = torch.Generator()
        generator.manual_seed(self.options.seed * 1_000_003 + int(batch.index))
        terms = self.tuner.losses(
            TuningBatch(batch.tokens, batch.loss_mask, batch.documents, batch.positions, generator)
        )
        total = torch.stack([total for total, _ in terms.values()]).sum()
        loss: Tensor = total / max(1, sum(count for _, count in terms.values()))
        if not math.isfinite(loss.item()):
            raise FalconLabError(
                f"target tuning: the loss is {loss.item()} at step {self.global_step}; lower "
                f"target.tune.lr (now {self.options.lr:g})"
            )
        self.log("train/loss", loss, prog_bar=True)
        for name, (total, count) in terms.items():
            self.log(f"train/{name}", total.detach() / max(1, count), prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with linear warm-up, then cosine decay to ``FINAL_LR``."""
        options = self.options
        weights = [weight for weight in self.trained.parameters() if weight.requires_grad]
        optimizer = OptimizerConfig(
            lr=options.lr,
            betas=[0.9, 0.95],
            weight_decay=options.weight_decay,
            warmup_steps=options.warmup_steps,
            final_lr=FINAL_LR,
        )
        return make_optimizer(weights, optimizer, options.max_steps)


def tune(
    parent: Target,
    tuner: TargetTuner,
    node: Mapping[str, Any],
    folder: Path,
    announce: Callable[[str], None],
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Tune a target, and save what comes of it with its card.

    Args:
        parent: is trained in place, and of no use afterwards.
        tuner: says what is trained.
        node: its options.
        folder: is made an ordinary one of Hugging Face's.
        announce: is called with one line for the user.
        provenance: whose the tuner is.

    Raises:
        FalconLabError: the data cannot be read or are another target's, or there is no room.
    """
    options, watch = options_of(node), Stopwatch()
    origin = Parent(parent.name, parent.fingerprint)
    data = tuning_data(parent, options)
    before, tokens = answer_loss(parent, data)
    dtype, tokenizer = parent.dtype, parent.tokenizer
    trained = tuner.begin(parent.model.float(), tokenizer)
    weights = check_training(trained)
    announce(
        f"{len(data.train_sequences):,} sequences of {options.length} tokens, {options.max_steps} "
        f"steps of {options.batch_size}; {weights / 1e6:.1f} M weights are trained"
    )
    make_folder(folder)
    module = TargetTuning(tuner, trained, options)
    with warnings.catch_warnings():
        # As it decodes, without dropout, so that a resumed training is an undisturbed one.
        warnings.filterwarnings("ignore", "Found .* module.* in eval mode")
        # Validation is perplexity, before and after.
        warnings.filterwarnings("ignore", "You passed in a `val_dataloader`")
        train(
            module,
            data,
            {
                "max_steps": options.max_steps,
                "gradient_clip_val": options.gradient_clip_val,
                "precision": options.precision,
                "limit_val_batches": 0,
                "log_every_n_steps": min(LOG_EVERY, options.max_steps),
                "devices": 1,  # other processes would wait for the same target
            },
            folder,
            HistoryLogger(folder / HISTORY),
            options.checkpoint_every,
        )
    seconds = watch.lap()
    model = tuner.finish().to("cpu", dtype)
    save_whole(tokenizer, folder, last="tokenizer_config.json")
    save_whole(model.eval(), folder, last="model.safetensors")
    after, _ = answer_loss(Target(model.float(), tokenizer, name=parent.name), data)
    card = Tuning(
        origin,
        dict(node),
        dict(provenance or {}),
        trained=weights,
        tokens=options.max_steps * options.batch_size * options.length,
        heldout_tokens=tokens,
        parent_perplexity=math.exp(before),
        perplexity=math.exp(after),
        seconds=seconds,
    )
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    card.write(folder)
    announce(card.sentence)


def tuning_data(parent: Target, options: TuningOptions) -> FalconDataModule:
    """Return the packed data that a target is tuned on.

    Raises:
        FalconLabError: they are the dialogues of another target, or longer than it reads.
    """
    assert options.corpus is not None
    refuse_other_author(options.corpus, parent)
    config = DataConfig(
        corpus=options.corpus,
        documents=options.documents,
        length=options.length,
        batch_size=options.batch_size,
        validation=options.validation,
        seed=options.seed,
        chat_template=options.chat_template,
    )
    return FalconDataModule(
        config,
        parent.tokenizer,
        max_positions=parent.max_positions,
        vocab_size=parent.vocab_size,
    )


def check_training(trained: nn.Module) -> int:
    """Return how many weights are trained; see that their training has room.

    Activations are not counted.

    Raises:
        FalconLabError: nothing is trained, or there is too little memory.
    """
    count = sum(weight.numel() for weight in trained.parameters() if weight.requires_grad)
    if not count:
        raise FalconLabError("target.tune: its tuner trains no weights")
    needed = BYTES * count
    free = free_memory(torch.device("cpu"))
    if free is not None and needed > free:
        raise FalconLabError(
            f"target.tune: training {count / 1e6:.0f} M weights takes {gib(needed)}, and "
            f"{gib(free)} are free; train fewer of them (LoRA), or make room"
        )
    return count


@torch.no_grad()
def answer_loss(target: Target, data: FalconDataModule) -> tuple[float, int]:
    """Return the loss in nats per token over held-out answers, and how many tokens they are."""
    total, count = 0.0, 0
    for batch in data.val_dataloader():
        hidden = target.backbone(
            tokens=batch.tokens,
            positions=batch.positions,
            mask=packed_mask(batch.documents),
        )
        loss, tokens = next_token_loss(target.head(hidden), batch)
        total, count = total + float(loss), count + tokens
    return total / max(1, count), count
