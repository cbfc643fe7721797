"""The steps of making a target: tokenizer, training, judgement.

Each leaves its product in the folder, so that a killed making goes on where it stopped.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from falcon_lab.data.corpora import corpus
from falcon_lab.data.datamodule import FalconDataModule
from falcon_lab.data.tokenizer import train_tokenizer
from falcon_lab.decoding.baseline import PlainEngine
from falcon_lab.decoding.sampling import Sampling
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.distillation.training import train
from falcon_lab.evaluation.prompts import load_prompts
from falcon_lab.reporting.results import write_atomically
from falcon_lab.schema import DataConfig, PretrainingConfig, PromptsConfig
from falcon_lab.targets.pretraining import Pretraining, build_model
from falcon_lab.targets.quality import (
    Quality,
    complete_part,
    distinct_share,
    judge,
    parses,
    read_figures,
)
from falcon_lab.targets.target import Target

MARK = "tokenizer_config.json"
"""The file of a saved tokenizer by which it is known."""

TOKENIZER_DOCUMENTS = 1000
"""Merges are learnt from this many documents: more change little and cost much."""


def trained_tokenizer(recipe: PretrainingConfig, folder: Path) -> Any:
    """The recipe's tokenizer, trained unless the folder holds it."""
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
        save_whole(trained, folder)
    return AutoTokenizer.from_pretrained(folder)


def save_whole(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer so that a kill leaves no half of it: the file that is looked for is last."""
    with TemporaryDirectory(dir=folder, prefix="tokenizer-") as place:
        tokenizer.save_pretrained(place)
        for file in sorted(Path(place).iterdir(), key=lambda file: file.name == MARK):
            file.replace(folder / file.name)


def data_of(recipe: PretrainingConfig, tokenizer: Any) -> FalconDataModule:
    """Packed batches of the recipe's corpus."""
    config = DataConfig(
        corpus=recipe.corpus,
        documents=recipe.documents,
        length=recipe.length,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
    )
    return FalconDataModule(config, tokenizer, max_positions=recipe.model.max_positions)


def trained_model(recipe: PretrainingConfig, tokenizer: Any, folder: Path) -> LlamaForCausalLM:
    """The recipe's model, trained; with its held-out loss in ``loss.json``."""
    if read_figures(folder / "loss.json"):
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
        model.eval().save_pretrained(folder)
        loss = held_out_loss(model, data)
        write_atomically(folder / "loss.json", json.dumps({"nats_per_token": loss}))
    return model


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, data: FalconDataModule) -> float:
    """Nats per token over the validation sequences."""
    module = Pretraining(model, PretrainingConfig())
    sums = [module.loss_of(batch) for batch in data.val_dataloader()]
    return float(sum(total for total, _ in sums)) / max(1, sum(count for _, count in sums))


def judged_quality(
    name: str, recipe: PretrainingConfig, model: LlamaForCausalLM, tokenizer: Any, folder: Path
) -> Quality:
    """Judge the target by greedy completions of held-out prompts; written to ``quality.json``."""
    loss = json.loads((folder / "loss.json").read_text("utf-8"))["nats_per_token"]
    target = Target(model, tokenizer, name=name)
    prompts = load_prompts(
        PromptsConfig(name="heldout", limit=recipe.gate.prompts),
        corpus=recipe.corpus,
        tokenizer=tokenizer,
        seed=recipe.seed + 1,  # not the prompts that speed is measured on
    )
    answers = [complete(target, prompt.turns[0], recipe.gate.max_new_tokens) for prompt in prompts]
    judged = judge(
        recipe.gate,
        loss=loss,
        parsed=[
            parses(complete_part(prompt.turns[0], text, finished=finished))
            for prompt, (_, text, finished) in zip(prompts, answers, strict=True)
        ],
        distinct=[distinct_share(tokens) for tokens, _, _ in answers],
    )
    write_atomically(folder / "quality.json", json.dumps(judged.as_dict(), indent=2))
    return judged


def complete(target: Target, prompt: str, max_new_tokens: int) -> tuple[list[int], str, bool]:
    """Greedy completion: tokens, text, and whether the target ended it itself."""
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
