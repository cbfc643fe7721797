"""Decoding by a server that runs the target: the same sequences in, the same texts out.

Shapes: T tokens of a text, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from falcon_lab.config.schema import ServerConfig
from falcon_lab.environment import server_key
from falcon_lab.errors import FalconLabError
from falcon_lab.serving.client import (
    Choice,
    Completion,
    InFlight,
    RefusedError,
    Server,
    chosen,
)

if TYPE_CHECKING:
    from falcon_lab.decoding.round import DecodedSequence
    from falcon_lab.model.target import Target

PROBE = (
    "The server must read this as we do: 1234567890 tokens, \u00fcber-l\u00e4ngste W\u00f6rter, "
    "\u6f22\u5b57 and \U0001f680.\n\n    def f(x):\n\treturn [x ** 2, {'k': -1.5e-3}]  # <b>\n"
)
"""Text by whose tokens two tokenizers are told apart."""
PROBED = 24
"""Tokens that a server writes behind it, which are compared with what the target would write."""
ALIKE = 0.75
"""Share of them that must be the target's most likely ones; rounding changes one now and then."""
PRIMARY = 2**31
"""Seeds of requests are below it; some servers take no larger ones."""


@dataclass(frozen=True)
class Terms:
    """How a server is to be asked.

    Attributes:
        model: its name for the target.
        takes_ids: whether it takes token ids as a prompt.
    """

    model: str
    takes_ids: bool


class ServedEngine:
    """Has a server decode sequences, many of them in flight at a time.

    Before its first request the server is held against the target (``check``).

    Args:
        target: the model that it should run, with its tokenizer.
        config: of the server.
    """

    def __init__(self, target: Target, config: ServerConfig) -> None:
        self.target, self.config = target, config
        self._server = Server(config, server_key())
        self._terms: Terms | None = None

    def decode(
        self, waiting: deque[DecodedSequence], batch_size: int, *, longest: int | None = None
    ) -> Iterator[DecodedSequence]:
        """Decode sequences as ``Engine.decode`` does, in whatever order the server ends them.

        Args:
            waiting: in their order; empty in the end. Whoever is given a sequence may add others.
            batch_size: is the server's own concern; ``data.server.concurrency`` are in flight.
            longest: tokens of a text at the most; None: of those that wait.

        Raises:
            FalconLabError: as ``check``, or the server does not do what it is asked.
        """
        if not waiting:
            return
        if longest is None:
            longest = max(len(one.prompt) + one.transcript.remaining for one in waiting)
        terms = self.check(longest)

        def ask(sequence: DecodedSequence) -> Completion:
            return self._server.complete(self._request(sequence, terms))

        with InFlight(ask) as flight:
            while waiting or flight.count:
                while waiting and flight.count < self.config.concurrency:
                    flight.send(waiting.popleft())
                sequence, found = flight.receive()
                self._refuse_other_length(found, len(sequence.prompt))
                self._end(sequence, found.choices[0])
                yield sequence

    # --- one text -------------------------------------------------------------------------------

    def _request(self, sequence: DecodedSequence, terms: Terms) -> dict[str, Any]:
        sampling = sequence.sampling
        return {
            **self._greedy(sequence.prompt.tolist(), sequence.transcript.remaining, terms),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "seed": sequence.generator.initial_seed() % PRIMARY,
        }

    def _greedy(self, prompt: Sequence[int], most: int, terms: Terms) -> dict[str, Any]:
        """Return a request for the most likely text, whatever the server has as its defaults."""
        return {
            "model": terms.model,
            "prompt": list(prompt) if terms.takes_ids else self._text(prompt),
            "max_tokens": most,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(self.target.eos_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
        }

    def _text(self, prompt: Sequence[int]) -> str:
        """Return a prompt as text, to which the server adds what opens every text."""
        opening = self._opening()
        begun = opening and list(prompt[: len(opening)]) == opening
        return str(self.target.tokenizer.decode(prompt[len(opening) :] if begun else prompt))

    def _opening(self) -> list[int]:
        """Return the special tokens that the tokenizer puts before a text."""
        special, plain = self._encoded("a", special=True), self._encoded("a")
        return special[: special.index(plain[0])] if plain and plain[0] in special else []

    def _encoded(self, text: str, *, special: bool = False) -> list[int]:
        return list(
            self.target.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        )

    def _end(self, sequence: DecodedSequence, choice: Choice) -> None:
        """Add what a server has written to a sequence, which ends with it."""
        sequence.add(self._tokens(choice))
        if not sequence.ended and choice.finish_reason == "stop":
            sequence.add([self._end_token(choice)])
        if sequence.ended:
            return
        if choice.token_ids is not None:
            raise FalconLabError(
                f"data.server {self.config.url} ends a text after {len(choice.token_ids)} tokens "
                f"({choice.finish_reason}), and the target goes on; start it with the target's own "
                "length (--max-model-len) and end tokens"
            )
        sequence.transcript.finish = "length"  # the text's tokens are fewer than were written

    def _tokens(self, choice: Choice) -> list[int]:
        tokens = self._encoded(choice.text) if choice.token_ids is None else choice.token_ids
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.target.vocab_size:
            raise FalconLabError(
                f"data.server {self.config.url} writes token {max(tokens)}, and target "
                f"{self.target.name} has {self.target.vocab_size}; it serves another model"
            )
        return tokens

    def _end_token(self, choice: Choice) -> int:
        """Return the token that ended a text, which not every server shows."""
        ends = self.target.eos_ids
        for shown in (choice.stop_reason, choice.matched_stop, self.target.tokenizer.eos_token_id):
            if isinstance(shown, int) and shown in ends:
                return shown
        if not ends:
            raise FalconLabError(
                f"data.server {self.config.url} has ended a text, and target {self.target.name} "
                "has no token that ends one"
            )
        return min(ends)

    # --- whether it is the target ---------------------------------------------------------------

    def check(self, longest: int) -> Terms:
        """See that the server runs the target, once.

        Compared are the model's name and length, its tokens of a text, and what it writes behind
        that.

        Args:
            longest: tokens that it must read.

        Raises:
            FalconLabError: it has another model, as far as that shows, or one of another length.
            UnreachableError: it does not answer.
        """
        if self._terms is None:
            model = chosen(self._server.models(), self.config)
            if model.max_model_len is not None and model.max_model_len < longest:
                raise FalconLabError(
                    f"data.server {self.config.url} reads {model.max_model_len} tokens, and texts "
                    f"have up to {longest}; start it with --max-model-len {longest}, or lower "
                    "data.length"
                )
            probe = self._encoded(PROBE)
            self._compare_tokens(model.id, probe)
            terms, written = self._probe(model.id, probe)
            self._compare_texts(model.id, probe, written)
            self._terms = terms
        return self._terms

    def _compare_tokens(self, model: str, probe: list[int]) -> None:
        """Hold the server's tokens of a text against ours, or how many they are."""
        tokens = self._server.tokenize(model, PROBE)
        if tokens is not None:
            if tokens != probe:
                self._refuse(model, f"{len(tokens)} other tokens for the {len(probe)}")
            return
        asked = {"model": model, "prompt": PROBE, "max_tokens": 1, "temperature": 0.0}
        usage = self._server.complete(asked).usage
        count = len(probe) if usage is None else usage.prompt_tokens
        if count not in (len(probe), len(self._encoded(PROBE, special=True))):
            self._refuse(model, f"{count} tokens for the {len(probe)}")

    def _probe(self, model: str, probe: list[int]) -> tuple[Terms, list[int]]:
        """Have the server write behind a prompt of token ids, or else of text."""
        terms = Terms(model, takes_ids=True)
        try:
            found = self._server.complete(self._greedy(probe, PROBED, terms))
            self._refuse_other_length(found, len(probe))
        except RefusedError as error:
            if error.status not in (400, 422):
                raise
            terms = Terms(model, takes_ids=False)
            found = self._server.complete(self._greedy(probe, PROBED, terms))
        return terms, self._tokens(found.choices[0])

    def _refuse_other_length(self, found: Completion, length: int) -> None:
        count = length if found.usage is None else found.usage.prompt_tokens
        if count not in (length, length + len(self._opening())):
            raise FalconLabError(
                f"data.server {self.config.url} has read {count} tokens where it was sent "
                f"{length}; it adds something to prompts, or has cut one off"
            )

    @torch.no_grad()
    def _compare_texts(self, model: str, probe: list[int], written: list[int]) -> None:
        """Hold what a server writes against what the target finds most likely, token by token."""
        if not written:
            return
        tokens = torch.tensor([*probe, *written[:-1]], device=self.target.device)[None]
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        features = self.target.teacher(tokens, torch.zeros_like(tokens), positions)
        likely = self.target.head(features[0, len(probe) - 1 :]).argmax(-1)  # [T, H] -> [T]
        same = int((likely == likely.new_tensor(written)).sum())
        if same < ALIKE * len(written):
            raise FalconLabError(
                f"data.server {self.config.url}: {model} is not target {self.target.name}: of "
                f"{len(written)} tokens that it writes, {same} are those that the target would; "
                "serve the same weights, or name another by data.server.model"
            )

    def _refuse(self, model: str, counted: str) -> None:
        raise FalconLabError(
            f"data.server {self.config.url}: {model} is not target {self.target.name}: it makes "
            f"{counted} that the target's tokenizer makes of a text; serve the same model, or name "
            "another by data.server.model"
        )
