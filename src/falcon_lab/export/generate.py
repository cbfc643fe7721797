"""A drafter and a tree inside ``model.generate`` of transformers.

from falcon_lab.export.generate import Speculation

speculation = Speculation("runs/csgd/drafter", "tree.name=dynamic")
model.generate(**inputs, custom_generate=speculation, max_new_tokens=128)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from falcon_lab.config.saved import decoding_experiment, opened_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.plugins.discovery import load_components

if TYPE_CHECKING:
    from torch import Tensor

    from falcon_lab.decoding.engine import SpeculativeEngine
    from falcon_lab.decoding.generation import Generation

WARPERS = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper")
"""What transformers does to logits of which our sampling does the same."""
ENDS = ("MaxLengthCriteria", "EosTokenCriteria")
"""What ends a text in transformers and here."""


@dataclass(frozen=True)
class _Engine:
    """An engine, and the model that it was made for."""

    model: Any
    engine: SpeculativeEngine


class Speculation:
    """A callable for ``custom_generate``: greedy texts are the model's own, in fewer passes.

    Attributes:
        generations: of the latest call, one a sequence: tokens, rounds and times.

    Args:
        drafter: a saved drafter's folder or name.
        overrides: of the configuration, such as ``tree.name=chain``.
        tokenizer: the model's; None loads it from where the model came from.
        force: use it with another model than it was trained for.

    Raises:
        FalconLabError: there is no such drafter, or an override is wrong.
    """

    def __init__(
        self, drafter: str, *overrides: str, tokenizer: Any = None, force: bool = False
    ) -> None:
        self._drafter, self._tokenizer, self._force = str(drafter), tokenizer, force
        self._experiment = decoding_experiment(self._drafter, list(overrides))
        self._made: _Engine | None = None
        self.generations: list[Generation] = []

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
        generation_config: Any = None,
        **arguments: Any,
    ) -> Tensor:
        """Continue ``[B, T]`` tokens as ``generate`` asks for it: ``[B, T + …]``, padded behind.

        Raises:
            FalconLabError: it asks for something else than greedy or sampled texts, or as
                ``load_drafter``.
        """
        import torch

        from falcon_lab.decoding.stopping import StopCondition
        from falcon_lab.sampling import Sampling

        _refuse_other(logits_processor, stopping_criteria, generation_config)
        engine = self._engine(model)
        config = generation_config
        sampling = Sampling()
        if config.do_sample:
            top_k, top_p = config.top_k or 0, config.top_p
            sampling = Sampling(config.temperature or 1.0, top_k, 1.0 if top_p is None else top_p)
        ends = _listed(config.eos_token_id)
        seeds = torch.randint(2**62, (len(input_ids),)).tolist()
        self.generations = engine.generate_batch(
            _prompts(input_ids, arguments.get("attention_mask")),
            batch_size=len(input_ids),
            max_new_tokens=config.max_length - input_ids.shape[1],
            sampling=sampling,
            generators=[torch.Generator(input_ids.device).manual_seed(seed) for seed in seeds],
            stop=StopCondition(ends),
        )
        padding = config.pad_token_id
        padding = next(iter(ends), 0) if padding is None else padding
        longest = max(len(each.tokens) for each in self.generations)
        rows = [[*g.tokens, *[padding] * (longest - len(g.tokens))] for g in self.generations]
        return torch.cat([input_ids, torch.tensor(rows, device=input_ids.device)], dim=1)

    def _engine(self, model: Any) -> SpeculativeEngine:
        """Return the engine of a model, which is made once."""
        if self._made is None or self._made.model is not model:
            self._made = _Engine(model, self._assembled(model))
        return self._made.engine

    def _assembled(self, model: Any) -> SpeculativeEngine:
        from transformers import AutoTokenizer

        from falcon_lab.decoding.assembling import assemble
        from falcon_lab.drafters.saved import load_drafter
        from falcon_lab.model.target import Target

        name = model.config.name_or_path
        tokenizer = self._tokenizer or AutoTokenizer.from_pretrained(name)
        target = Target(model, tokenizer, name=name, lean=self._experiment.target.lean)
        components, experiment = load_components(), self._experiment
        with opened_drafter(self._drafter, components) as folder:
            drafter = load_drafter(folder, target, components, force=self._force)
        parts = {
            "tree": experiment.tree,
            "acceptance": experiment.acceptance,
            "controller": experiment.controller,
        }
        return assemble(target, drafter, parts, components, decoding=experiment.decoding)


def _prompts(tokens: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the sequences of ``[B, T]`` without what is padded."""
    if mask is None:
        return list(tokens)
    return [row[kept.bool()] for row, kept in zip(tokens, mask, strict=True)]


def _listed(ids: Any) -> list[int]:
    """Return tokens that are one, some, or none."""
    if ids is None:
        return []
    return [int(each) for each in ids] if isinstance(ids, list | tuple) else [int(ids)]


def _refuse_other(processors: Sequence[Any], criteria: Sequence[Any], config: Any) -> None:
    """Refuse what speculative decoding here does not do.

    Raises:
        FalconLabError: naming it.
    """
    others = [type(each).__name__ for each in processors if type(each).__name__ not in WARPERS]
    others += [type(each).__name__ for each in criteria if type(each).__name__ not in ENDS]
    others += ["num_beams"] if (config.num_beams or 1) > 1 else []
    others += ["return_dict_in_generate"] if config.return_dict_in_generate else []
    if others:
        raise FalconLabError(
            f"generate asks for {others[0]}, which a drafter's custom_generate does not do; leave "
            "it out, or decode without custom_generate"
        )
