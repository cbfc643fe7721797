"""``llama.cpp`` on the same GGUF file, as one more method of the comparison.

It multiplies the file's quantised weights as they are, where the target has them undone: other
numbers, and so now and then another token. It is what somebody without a GPU would use instead.

Shapes: P prompt tokens.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.stopping import StopCondition, begin
from falcon_lab.errors import FalconLabError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from falcon_lab.sampling import Sampling

MODULE = "llama_cpp"
INSTALL = "llama-cpp-python is not installed; pip install llama-cpp-python"
LEAST = 1024
"""Tokens of the first context."""


class LlamaGenerate:
    """Decodes plainly through ``llama-cpp-python``, on the processor alone.

    The model is loaded with the first prompt, and again where a context has become too small. It
    reads every prompt whole, as the other methods do.

    Args:
        target: whose tokens are used and whose context is the longest.
        path: of the GGUF file that the target was made from.
        threads: that it computes with.
    """

    lossless = False
    opaque = True  # nothing but its wall time is known

    def __init__(self, target: Any, path: str, threads: int) -> None:
        self.target = target
        self._path = path
        self._threads = threads
        self._context = 0
        self._model: Any = None

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
            FalconLabError: the prompt is empty or longer than the target's context, or
                llama-cpp-python is not installed.
        """
        transcript = begin(prompt, max_new_tokens, self.target.max_positions, stop)
        model = self._loaded(len(prompt) + transcript.remaining)
        model.reset()  # else it keeps what this prompt and the one before have in common
        model.set_seed(generator.initial_seed() % 2**32)
        tokens = model.generate(
            prompt.tolist(),
            temp=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=0.0,
            repeat_penalty=1.0,
        )
        while transcript.finish is None:
            transcript.extend([next(tokens)])
        return Generation(transcript.tokens, transcript.finish)

    def _loaded(self, length: int) -> Any:
        """Return the model, with a context of so many tokens at least."""
        if self._model is None or length > self._context:
            try:
                llama_cpp = import_module(MODULE)
            except ModuleNotFoundError as error:
                raise FalconLabError(INSTALL) from error
            self._context = max(LEAST, 2 * length)
            self._model = llama_cpp.Llama(
                model_path=self._path,
                n_ctx=self._context,
                n_threads=self._threads,
                n_threads_batch=self._threads,
                n_gpu_layers=0,
                verbose=False,
            )
        return self._model
