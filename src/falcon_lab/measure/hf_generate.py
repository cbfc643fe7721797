"""Hugging Face ``generate``, in any of its ways, as one more method of the comparison.

Shapes: P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.stopping import StopCondition, begin

if TYPE_CHECKING:
    from falcon_lab.sampling import Sampling


class HfGenerate:
    """``target.model.generate`` at its honest best: KV cache on, same EOS, same limits.

    Whatever generation defaults a checkpoint brings along (repetition penalties, beams, its own
    top-k) are set to neutral, so that it writes what plain decoding writes.

    Args:
        target: a ``Target``; its ``model``, ``tokenizer``, ``eos_ids`` and ``max_positions`` are
            used.
        settings: more entries of the generation configuration, such as ``cache_implementation``.
        arguments: more arguments of ``generate``, such as ``assistant_model``.
    """

    lossless = True
    opaque = True  # nothing but its wall time is known

    def __init__(
        self,
        target: Any,
        *,
        settings: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.target = target
        self.settings = dict(settings or {})
        self.arguments = dict(arguments or {})

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator,
        stop: StopCondition,
    ) -> Generation:
        """Continue ``prompt`` (``[P]`` long). There are no rounds, and no times inside.

        Raises:
            FalconLabError: the prompt is empty or longer than the target's context.
        """
        transcript = begin(prompt, max_new_tokens, self.target.max_positions, stop)
        ids = prompt[None]
        strings: dict[str, Any] = {}
        if stop.strings:
            strings = {"stop_strings": list(stop.strings), "tokenizer": stop.tokenizer}
        # generate draws from the global generator: lend it our seed and put its state back.
        with torch.random.fork_rng([prompt.device] if prompt.is_cuda else []):
            torch.manual_seed(generator.initial_seed())
            out = self.target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self._config(transcript.remaining, sampling, stop),
                **strings,
                **self.arguments,
            )
        transcript.extend(out[0, prompt.shape[0] :].tolist())
        return Generation(transcript.tokens, transcript.finish or "length")

    def _config(self, room: int, sampling: Sampling, stop: StopCondition) -> Any:
        from transformers import GenerationConfig

        eos = sorted(stop.eos_ids)
        drawing = {}
        if not sampling.greedy:
            drawing = {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
            }
        return GenerationConfig(
            max_new_tokens=room,
            do_sample=not sampling.greedy,
            use_cache=True,
            # An id that cannot be written stands for "no EOS": None would bring back the model's.
            eos_token_id=eos or [-1],
            pad_token_id=eos[0] if eos else 0,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            typical_p=1.0,
            **drawing,
            **self.settings,
        )
