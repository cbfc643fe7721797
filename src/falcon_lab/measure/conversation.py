"""Encode prompts as token ids, turn by turn.

Shapes: P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from falcon_lab.errors import FalconLabError

if TYPE_CHECKING:
    from falcon_lab.data.heldout import Prompt


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt that knows how to become tokens.

    Later turns hold the answers that came before, so they are encoded when those are there.

    Attributes:
        id: unique among the prompts of a measurement.
        category: for grouping.
        turns: what the user says, one text a turn.
        tokenizer: the target's.
        chat: whether turns go through the tokenizer's chat template; without it, prompts and
            answers are simply joined.
        device: where the tokens are wanted.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    tokenizer: Any
    chat: bool = False
    device: torch.device | str = "cpu"

    def tokens(self, answers: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return all that the target reads before it answers turn ``len(answers)``, ``[P]`` long.

        Raises:
            FalconLabError: when that is nothing.
        """
        ids = self._chat(answers) if self.chat else self._plain(answers)
        if not ids:
            raise FalconLabError(
                f"prompt {self.id!r}, turn {len(answers) + 1}: no token is left after encoding; "
                "give it some text"
            )
        return torch.tensor(ids, dtype=torch.long, device=self.device)

    def text(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _chat(self, answers: Sequence[Sequence[int]]) -> list[int]:
        messages = []
        for turn, answer in zip(self.turns, answers, strict=False):
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": self.text(answer)})
        messages.append({"role": "user", "content": self.turns[len(answers)]})
        rendered = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        # The template writes the special tokens itself.
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def _plain(self, answers: Sequence[Sequence[int]]) -> list[int]:
        ids = list(self.tokenizer(self.turns[0])["input_ids"])
        for answer, turn in zip(answers, self.turns[1:], strict=False):
            end = self.tokenizer.eos_token_id
            ids += [token for token in answer if token != end]
            ids += self.tokenizer(turn, add_special_tokens=False)["input_ids"]
        return ids


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    *,
    device: torch.device | str = "cpu",
    chat: bool | None = None,
) -> list[EncodedPrompt]:
    """Encode prompts for ``measure``.

    ``chat`` None uses a chat template where the tokenizer has one.

    Raises:
        FalconLabError: for a prompt without turns or an id that stands twice.
    """
    if chat is None:
        chat = bool(getattr(tokenizer, "chat_template", None))
    seen: set[str] = set()
    for prompt in prompts:
        if not prompt.turns:
            raise FalconLabError(f"prompt {prompt.id!r} has no turns")
        if prompt.id in seen:
            raise FalconLabError(f"prompt id {prompt.id!r} stands twice; ids must be unique")
        seen.add(prompt.id)
    return [
        EncodedPrompt(p.id, p.category, tuple(p.turns), tokenizer, chat, device) for p in prompts
    ]
