"""SAR-SFT: fine-tuning by which a target answers mask tokens with the tokens further ahead.

Behind a position p stand k mask tokens, at the positions p + 1 to p + k; the LM head says at the
j-th of them what it expects at p + 1 + j, so that they go on from where the token at p itself ends.

Shapes: B batch, T tokens, S positions with masks behind them, k masks, N tokens and masks, n rows
of the loss, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import TargetContext, TargetTuner, TuningBatch
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.families import decoder_of, max_positions
from falcon_lab.model.lm_head import final_logits
from falcon_lab.model.masks import packed_mask, with_positions_behind
from falcon_lab_space import SarSftConfig
from falcon_lab_space.mask_token import take_mask_token

MASKS = "answered_masks"
"""The key of a tuned target's config.json that says k."""

NONE = -100
"""Label of a row that does not count."""

ROWS = 512
"""Rows of logits at a time; they are computed again for the gradient."""

SHARE = 0.5
"""Of the documents, that the truncated layout cuts."""


@dataclass(frozen=True)
class Rows:
    """What the model reads, and what it should say.

    Attributes:
        tokens: ``[B, N]`` long.
        positions: ``[B, N]`` long.
        mask: ``[B, N, N]`` bool, of attention.
        labels: ``[B, N]`` long; ``NONE`` where nothing is asked.
        masks: ``[B, N]`` bool, which of them are mask tokens.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor
    labels: Tensor
    masks: Tensor


class SarSft(TargetTuner):
    """Trains a target on next tokens and on masks.

    Args:
        config: the options.
        context: is not needed.

    Raises:
        FalconLabError: peft is asked for and not installed.
    """

    def __init__(self, config: SarSftConfig, context: TargetContext) -> None:
        self.config = config
        if config.weights == "lora" and not has_peft():
            raise FalconLabError(
                "target.tune.weights is lora, which needs the package peft; pip install "
                "'falcon-lab-space[lora]', or set target.tune.weights=full"
            )

    def begin(self, model: Any, tokenizer: Any) -> nn.Module:
        """Give the model a mask token, and say what is trained.

        Raises:
            FalconLabError: the mask token is used already, or there is no room for masks.
        """
        config = self.config
        settings = model.config.get_text_config(decoder=True)
        if config.length + config.masks > max_positions(settings):
            raise FalconLabError(
                f"target.tune.length is {config.length}, and with {config.masks} masks behind them "
                f"the target's {max_positions(settings)} positions do not suffice; lower it"
            )
        self.mask_token = take_mask_token(model, tokenizer, config.mask_token)
        setattr(settings, MASKS, config.masks)
        self._model, self._settings = model, settings
        self._adapted = None if config.weights == "full" else self._with_lora(model)
        self._backbone = Backbone(decoder_of(model))
        whole: nn.Module = model
        return self._adapted or whole.requires_grad_(True)

    def _with_lora(self, model: Any) -> MaskRow:
        """Add low-rank parts to all linear layers but the LM head, and a change of one row."""
        from peft import LoraConfig, get_peft_model

        rank = self.config.rank
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            return MaskRow(get_peft_model(model, lora), model, self.mask_token)

    def losses(self, batch: TuningBatch) -> Mapping[str, tuple[Tensor, int]]:
        """Return the loss of next tokens, and that of masks.

        Raises:
            FalconLabError: a document contains the mask token.
        """
        if (batch.tokens == self.mask_token).any():
            raise FalconLabError(
                "target.tune.mask_token: the documents contain it; name a token that they do not"
            )
        layout = packed_rows if self.config.layout == "packed" else truncated_rows
        rows = layout(batch, self.config.masks, self.config.positions, self.mask_token)
        hidden = self._backbone(tokens=rows.tokens, positions=rows.positions, mask=rows.mask)
        asked = rows.labels != NONE
        return {
            name: (self._cross_entropy(hidden[which], rows.labels[which]), int(which.sum()))
            for name, which in (("next", asked & ~rows.masks), ("masks", asked & rows.masks))
        }

    def _cross_entropy(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss of rows ``[n, H]``, a part of their logits at a time."""
        total = hidden.new_zeros(())
        for start in range(0, len(labels), ROWS):
            rows = slice(start, start + ROWS)
            total = total + checkpoint(self._loss, hidden[rows], labels[rows], use_reentrant=False)
        return total

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self._model.get_output_embeddings()(hidden)
        if self._adapted is not None:
            logits = self._adapted.with_row(logits, hidden)
        return F.cross_entropy(
            final_logits(logits, self._settings).float(), labels, reduction="sum"
        )

    def finish(self) -> Any:
        """Return the model, with what was added to it merged into its weights."""
        if self._adapted is None:
            return self._model.requires_grad_(False)
        return self._adapted.merged().requires_grad_(False)


def has_peft() -> bool:
    """Return whether peft can be imported."""
    try:
        return find_spec("peft") is not None
    except ValueError:  # it is known not to be there
        return False


class MaskRow(nn.Module):
    """A model with low-rank parts whose embedding is trained in one row.

    Attributes:
        delta: ``[H]``, what is added to the row.

    Args:
        adapted: the model with its parts, of peft's.
        model: the model itself.
        token: whose row it is.
    """

    def __init__(self, adapted: Any, model: Any, token: int) -> None:
        super().__init__()
        self.adapted = adapted
        self._token = token
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        self._table = (table,)  # a tuple, so that it is not registered a second time
        self._tied = head.weight is table.weight
        self.delta = nn.Parameter(torch.zeros(table.weight.shape[1]))
        self._hook = table.register_forward_hook(self._embed)

    def _embed(self, table: Any, given: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        change = self.delta * getattr(table, "embed_scale", 1.0)
        here = (given[0] == self._token)[..., None]
        return embedded + (here * change).to(embedded.dtype)

    def with_row(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Return logits ``[n, V]`` with the change of the row, where the LM head has the same."""
        if not self._tied:
            return logits
        column = torch.tensor([self._token], device=logits.device)
        change = (hidden @ self.delta.to(hidden.dtype))[:, None]
        return logits.index_add(1, column, change.to(logits.dtype))

    @torch.no_grad()
    def merged(self) -> Any:
        """Return the model with all changes in its own weights."""
        self._hook.remove()
        weight = self._table[0].weight
        weight[self._token] += self.delta.to(weight)
        return self.adapted.merge_and_unload()


def next_labels(batch: TuningBatch) -> Tensor:
    """Return ``[B, T]``: the token behind each one, where it counts and is of the same document."""
    labels = torch.full_like(batch.tokens, NONE)
    counts = batch.loss_mask[:, 1:] & (batch.documents[:, 1:] == batch.documents[:, :-1])
    labels[:, :-1] = torch.where(counts, batch.tokens[:, 1:], NONE)
    return labels


def packed_rows(batch: TuningBatch, masks: int, positions: int, token: int) -> Rows:
    """Put k masks behind some positions of every sequence, hidden from its tokens.

    Args:
        batch: the sequences.
        masks: k.
        positions: with masks behind them, at the most; S.
        token: the mask token.
    """
    labels = next_labels(batch)
    source = _drawn(batch, labels, positions)  # [B, S]
    step = torch.arange(1, masks + 1, device=source.device)
    label_at = (source[..., None] + step).flatten(1)  # whose next token it is
    inside = label_at < labels.shape[1]
    label_at = label_at.clamp(max=labels.shape[1] - 1)
    behind = source.repeat_interleave(masks, 1)
    same = batch.documents.gather(1, behind) == batch.documents.gather(1, label_at)
    ahead = torch.where(inside & same, labels.gather(1, label_at), NONE)
    where = batch.positions.gather(1, behind) + step.repeat(source.shape[1])
    return Rows(
        torch.cat((batch.tokens, torch.full_like(behind, token)), 1),
        torch.cat((batch.positions, where), 1),
        with_positions_behind(packed_mask(batch.documents), source, masks),
        torch.cat((labels, ahead), 1),
        torch.cat((torch.zeros_like(batch.loss_mask), torch.ones_like(behind).bool()), 1),
    )


def _drawn(batch: TuningBatch, labels: Tensor, count: int) -> Tensor:
    """Draw positions ``[B, S]`` in rising order, those first whose masks have something to say."""
    drawn = torch.rand(labels.shape, generator=batch.generator).to(labels.device)
    ahead = torch.cat((labels[:, 1:], labels.new_full((len(labels), 1), NONE)), 1) != NONE
    same = batch.documents[:, 1:] == batch.documents[:, :-1]
    ahead[:, :-1] &= same
    chosen: Tensor = (drawn + ahead).topk(min(count, labels.shape[1])).indices
    return chosen.sort().values


def truncated_rows(batch: TuningBatch, masks: int, positions: int, token: int) -> Rows:
    """Cut half of the documents somewhere in what counts, and put masks at their ends.

    What was cut off is read and asks for nothing.
    """
    labels, cut = next_labels(batch), torch.zeros_like(batch.loss_mask)
    is_mask = torch.zeros_like(batch.loss_mask)
    for row, documents in enumerate(batch.documents.cpu()):
        for document in documents.unique():
            if document < 0 or torch.rand((), generator=batch.generator) >= SHARE:
                continue
            here = documents == document
            places = (here & batch.loss_mask[row].cpu()).nonzero().flatten()
            last = int(here.nonzero().max())
            starts = places[(places > here.nonzero().min()) & (places < last)]
            if not len(starts):
                continue
            drawn = torch.randint(len(starts), (), generator=batch.generator)
            start = int(starts[drawn])
            end = min(start + masks, last + 1)
            is_mask[row, start:end] = True
            cut[row, end : last + 1] = True
    return Rows(
        torch.where(is_mask, token, batch.tokens),
        batch.positions,
        packed_mask(batch.documents),
        labels.masked_fill(cut, NONE),
        is_mask,
    )
