"""Hugging Face ``generate`` as one more method of the comparison.

Shapes: P prompt tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from falcon_lab.decoding.generation import Generation, StopCondition
    from falcon_lab.decoding.sampling import Sampling


class HfGenerate:
    """``target.model.generate`` at its honest best: KV cache on, same EOS, same limits.

    Whatever generation defaults a checkpoint brings along (repetition penalties, beams, its own
    top-k) are set to neutral, so that it writes what plain decoding writes.
    """

    label = "HF generate"
    lossless = True
    opaque = True  # only its wall time is known

    def __init__(self, target: Any) -> None:
        self.target = target

    @torch.inference_mode()
    def generate(
        self,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator,
        stop: StopCondition,
    ) -> Generation:
        """Continue ``prompt`` (``[P]`` long). Prefill and decoding are not told apart."""
        from falcon_lab.decoding.generation import Generation, Seconds

        room = min(max_new_tokens, self.target.max_positions - prompt.shape[0])
        tokens: list[int] = []
        if room > 0:
            tokens = self._call(prompt, room, sampling, generator, stop)
        tokens, finish = self._cut(tokens, stop, short=room < max_new_tokens)
        nothing = Seconds(
            prefill=0.0, draft=0.0, verify=0.0, accept=0.0, commit=0.0, overhead=0.0, total=0.0
        )
        return Generation(tokens=tokens, finish=finish, rounds=[], seconds=nothing)

    def _call(
        self,
        prompt: Tensor,
        room: int,
        sampling: Sampling,
        generator: torch.Generator,
        stop: StopCondition,
    ) -> list[int]:
        ids = prompt[None]
        devices = [prompt.device] if prompt.is_cuda else []
        strings: dict[str, Any] = {}
        if stop.strings:
            strings = {"stop_strings": list(stop.strings), "tokenizer": self.target.tokenizer}
        # generate draws from the global generator: lend it our seed and put its state back.
        with torch.random.fork_rng(devices):
            torch.manual_seed(generator.initial_seed())
            out = self.target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self._config(room, sampling),
                **strings,
            )
        return [int(token) for token in out[0, prompt.shape[0] :].tolist()]

    def _config(self, room: int, sampling: Sampling) -> Any:
        from transformers import GenerationConfig

        eos = sorted(self.target.eos_ids)
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
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            typical_p=1.0,
            **drawing,
        )

    def _cut(self, tokens: list[int], stop: StopCondition, *, short: bool) -> tuple[list[int], str]:
        raise NotImplementedError
