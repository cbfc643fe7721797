"""The steps of making a target: tokenizer, training, judgement.

Each leaves its product in the folder, so that a killed making resumes where it stopped.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from falcon_lab.config.schema import DataConfig, ModelShape, PretrainingConfig
from falcon_lab.data.corpora import corpus
from falcon_lab.data.datamodule import FalconDataModule
from falcon_lab.data.encoding import train_tokenizer
from falcon_lab.data.heldout import heldout_prompts
from falcon_lab.data.packing import Batch
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.errors import FalconLabError, one_line
from falcon_lab.files import about, make_folder, write_atomically
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.masks import packed_mask
from falcon_lab.model.memory import check_room
from falcon_lab.model.target import Target
from falcon_lab.pretraining.quality import (
    JUDGEMENT,
    LOSS,
    HeldOutLoss,
    Quality,
    complete_part,
    distinct_share,
    judge,
    parses,
    read_loss,
)
from falcon_lab.sampling import Sampling
from falcon_lab.training import cosine, scheduled, train


def build_model(shape: ModelShape, tokenizer: Any, *, seed: int) -> LlamaForCausalLM:
    """Build a randomly initialised Llama of the given shape with tied embeddings."""
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
    check_room(config, partial(LlamaForCausalLM, config), "target.pretraining.model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def next_token_loss(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """Return the summed next-token cross-entropy in nats, and the number of tokens it is over.

    ``logits`` are ``[B, T, V]``. Tokens count where the mask has them and the token before them is
    of the same document.
    """
    counts = batch.loss_mask[:, 1:] & (batch.documents[:, 1:] == batch.documents[:, :-1])
    loss = F.cross_entropy(
        logits[:, :-1][counts].float(), batch.tokens[:, 1:][counts], reduction="sum"
    )
    return loss, int(counts.sum())


def matrices_and_rest(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: only matrices decay."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


class Pretraining(L.LightningModule):
    """Trains a target on the next tokens of packed documents."""

    def __init__(self, model: LlamaForCausalLM, recipe: PretrainingConfig) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe
        # A view on the same weights; a tuple, so that they are not registered a second time.
        self._backbone = (Backbone(model.base_model),)
        self.save_hyperparameters({"recipe": asdict(recipe)})

    def loss_of(self, batch: Batch) -> tuple[Tensor, int]:
        """Return the summed loss of a batch and the number of tokens it is over."""
        hidden = self._backbone[0](
            tokens=batch.tokens,
            positions=batch.positions,
            mask=packed_mask(batch.documents),
        )
        return next_token_loss(self.model.lm_head(hidden), batch)

    def training_step(self, batch: Batch, _: int) -> Tensor:
        """Return the mean loss of a batch; stop the run where it is not finite."""
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
        """Return AdamW with linear warm-up, then cosine decay to ``FINAL_LR``."""
        recipe = self.recipe
        optimizer = torch.optim.AdamW(
            matrices_and_rest(self.model, recipe.weight_decay), lr=recipe.lr, betas=(0.9, 0.95)
        )

        def factor(step: int) -> float:
            if step < recipe.warmup_steps:
                return (step + 1) / recipe.warmup_steps
            decay = max(recipe.steps - recipe.warmup_steps, 1)
            return cosine((step - recipe.warmup_steps) / decay, FINAL_LR)

        return scheduled(optimizer, factor)


FINAL_LR = 0.01
"""Share of the learning rate at the last step."""
MARK = "tokenizer_config.json"
"""The file of a saved tokenizer that is written last."""
SAVING = ".saving"
"""Folder of files that are being written."""

TOKENIZER_DOCUMENTS = 1000
"""Documents that merges are computed from: more change little and cost much."""


def trained_tokenizer(recipe: PretrainingConfig, folder: Path) -> Any:
    """Return the recipe's tokenizer, trained unless the folder has it."""
    if not (folder / MARK).exists():
        documents = corpus(
            recipe.corpus,
            split="train",
            limit=min(recipe.documents, TOKENIZER_DOCUMENTS),
            seed=recipe.seed,
        )
        texts = [document.text or "" for document in documents]
        trained = train_tokenizer(texts, recipe.vocabulary)
        trained.model_max_length = recipe.model.max_positions
        save_whole(trained, folder, last=MARK)
    with left_before(folder):
        return AutoTokenizer.from_pretrained(folder)


@contextmanager
def left_before(folder: Path) -> Iterator[None]:
    """Name the folder where a library cannot read what an earlier attempt left there.

    Raises:
        FalconLabError: for whatever is raised inside.
    """
    try:
        yield
    except Exception as error:  # transformers, tokenizers and safetensors raise many kinds
        raise FalconLabError(
            f"{folder}: what an earlier attempt left there is damaged ({one_line(error)[:200]}); "
            "remove it, and the target is made anew"
        ) from error


def save_whole(saved: Any, folder: Path, *, last: str) -> None:
    """Save a tokenizer or a model: every file whole, and ``last`` the last of them.

    Raises:
        FalconLabError: it cannot be written.
    """
    place = folder / SAVING
    shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
    try:
        make_folder(place)
        with about(folder, also=(Exception,)):  # of a full disk the libraries say so in words
            saved.save_pretrained(place)
        with about(folder):
            for file in sorted(place.iterdir(), key=lambda file: file.name == last):
                file.replace(folder / file.name)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def save_stand_in(recipe: PretrainingConfig, folder: Path) -> None:
    """Save an untrained model of the recipe's shape, with a tokenizer of bytes alone.

    Raises:
        FalconLabError: the recipe's data cannot be used, or the folder cannot be written.
    """
    tokenizer = train_tokenizer([], recipe.vocabulary)
    data_of(recipe, tokenizer).check()
    model = build_model(recipe.model, tokenizer, seed=recipe.seed)
    with about(folder, also=(Exception,)):  # of a full disk the libraries say so in words
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)


def data_of(recipe: PretrainingConfig, tokenizer: Any) -> FalconDataModule:
    """Return packed batches of the recipe's corpus."""
    config = DataConfig(
        corpus=recipe.corpus,
        documents=recipe.documents,
        length=recipe.length,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
    )
    return FalconDataModule(config, tokenizer)


def trained_model(recipe: PretrainingConfig, tokenizer: Any, folder: Path) -> LlamaForCausalLM:
    """Return the recipe's model, trained, and write its held-out loss to ``loss.json``."""
    if read_loss(folder):
        with left_before(folder):
            return LlamaForCausalLM.from_pretrained(folder)
    model = build_model(recipe.model, tokenizer, seed=recipe.seed)
    data = data_of(recipe, tokenizer)
    trainer = train(
        Pretraining(model, recipe),
        data,
        {
            "max_steps": recipe.steps,
            "gradient_clip_val": 1.0,
            "limit_val_batches": 0,
            "devices": 1,  # small, and other processes would wait for the same target
        },
        folder,
        None,
        recipe.checkpoint_every,
    )
    if trainer.is_global_zero:
        save_whole(model.eval(), folder, last="model.safetensors")
        loss = held_out_loss(model, data)
        write_atomically(folder / LOSS, json.dumps(asdict(HeldOutLoss(loss))))
    return model


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, data: FalconDataModule) -> float:
    """Return the loss in nats per token over the validation sequences."""
    module = Pretraining(model, PretrainingConfig())
    sums = [module.loss_of(batch) for batch in data.val_dataloader()]
    return float(sum(total for total, _ in sums)) / max(1, sum(count for _, count in sums))


def judged_quality(
    name: str, recipe: PretrainingConfig, model: LlamaForCausalLM, tokenizer: Any, folder: Path
) -> Quality:
    """Judge the target by greedy completions of held-out prompts; write ``quality.json``."""
    known = read_loss(folder)
    if known is None:
        raise FalconLabError(
            f"{folder / LOSS}: the loss over held-out text is no finite number; lower "
            f"target.pretraining.lr (now {recipe.lr:g}), and remove {folder}"
        )
    target = Target(model, tokenizer, name=name)
    # The seed keeps these prompts apart from those that speed is measured on.
    found = heldout_prompts(recipe.corpus, tokenizer, seed=recipe.seed + 1)
    prompts = list(islice(found, recipe.gate.prompts))
    answers = [complete(target, prompt.turns[0], recipe.gate.max_new_tokens) for prompt in prompts]
    judged = judge(
        recipe.gate,
        loss=known.nats_per_token,
        parsed=[
            parses(complete_part(prompt.turns[0], text, finished=finished))
            for prompt, (_, text, finished) in zip(prompts, answers, strict=True)
        ],
        distinct=[distinct_share(tokens) for tokens, _, _ in answers],
    )
    write_atomically(folder / JUDGEMENT, json.dumps(judged.as_dict(), indent=2))
    return judged


def complete(target: Target, prompt: str, max_new_tokens: int) -> tuple[list[int], str, bool]:
    """Complete a prompt greedily: tokens, text, and whether the target ended it itself."""
    tokenizer = target.tokenizer
    generation = PlainEngine(target).generate(
        tokenizer(prompt, return_tensors="pt")["input_ids"][0].to(target.device),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(),
        generator=torch.Generator(target.device),
        stop=StopCondition(target.eos_ids, [], tokenizer),
    )
    text = tokenizer.decode(generation.tokens, skip_special_tokens=True)
    return generation.tokens, text, generation.finish == "eos"
