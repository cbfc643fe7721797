"""Encode prompts as token ids, turn by turn.

Shapes: P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from falcon_lab.errors import FalconLabError, one_line

if TYPE_CHECKING:
    from falcon_lab.data.heldout import Prompt
    from falcon_lab.model.target import Target


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
        longest: tokens that the target reads at the most; None does not check.
        system: what a chat template is given before the first turn; None: nothing.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    tokenizer: Any
    chat: bool = False
    device: torch.device | str = "cpu"
    longest: int | None = None
    system: str | None = None

    def tokens(self, answers: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return all that the target reads before it answers turn ``len(answers)``, ``[P]`` long.

        Raises:
            FalconLabError: that is nothing, leaves no room for an answer, or is refused by the
                target's chat template.
        """
        ids = self._chat(answers) if self.chat else self._plain(answers)
        if not ids:
            raise FalconLabError(
                f"prompt {self.id!r}, turn {len(answers) + 1}: no token is left after encoding; "
                "give it some text"
            )
        if self.longest is not None and len(ids) >= self.longest:
            raise FalconLabError(
                f"prompt {self.id!r}, turn {len(answers) + 1}: has {len(ids)} tokens with all that "
                f"comes before it, and the target reads {self.longest} with the answer; shorten "
                "it, leave it out, or take a target with more positions"
            )
        return torch.tensor(ids, dtype=torch.long, device=self.device)

    def text(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _chat(self, answers: Sequence[Sequence[int]]) -> list[int]:
        system = self.system
        messages = [] if system is None else [{"role": "system", "content": system}]
        for turn, answer in zip(self.turns, answers, strict=False):
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": self.text(answer)})
        messages.append({"role": "user", "content": self.turns[len(answers)]})
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # whatever a template raises
            raise FalconLabError(
                f"prompt {self.id!r}, turn {len(answers) + 1}: the target's chat template refuses "
                f"it ({one_line(error)[:300]}); mend the template beside its tokenizer, or take it "
                "out"
            ) from error
        # The template writes the special tokens itself.
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def _plain(self, answers: Sequence[Sequence[int]]) -> list[int]:
        ids = list(self.tokenizer(self.turns[0])["input_ids"])
        for answer, turn in zip(answers, self.turns[1:], strict=False):
            end = self.tokenizer.eos_token_id
            ids += [token for token in answer if token != end]
            ids += self.tokenizer(turn, add_special_tokens=False)["input_ids"]
        return ids


def has_chat_template(tokenizer: Any) -> bool:
    """Return whether turns can go through a template of the tokenizer's."""
    return bool(getattr(tokenizer, "chat_template", None))


def conversation(target: Target, system: str | None = None, *turns: str) -> EncodedPrompt:
    """Return a conversation with a target, through its chat template where it has one.

    Args:
        target: what answers.
        system: what it is told before the first turn; None: what its template says.
        turns: what the user has said so far.

    Raises:
        FalconLabError: its chat template refuses a system message, or leaves it out.
    """
    chat, longest = has_chat_template(target.tokenizer), target.max_positions
    plain = EncodedPrompt("yours", "own", turns, target.tokenizer, chat, target.device, longest)
    if system is None:
        return plain
    told = replace(plain, system=system)
    tried = [replace(one, turns=("a",), longest=None).tokens([]) for one in (plain, told)]
    if tried[0].tolist() == tried[1].tolist():
        raise FalconLabError(
            f"the chat template of {target.name} leaves a system message out; say it in the first "
            "turn"
        )
    return told


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    *,
    device: torch.device | str = "cpu",
    chat: bool | None = None,
    longest: int | None = None,
) -> list[EncodedPrompt]:
    """Encode prompts for ``measure``.

    Args:
        prompts: with unique ids.
        tokenizer: the target's.
        device: where the tokens are wanted.
        chat: None uses a chat template where the tokenizer has one.
        longest: tokens that the target reads at the most; None does not check.

    Raises:
        FalconLabError: for a prompt without turns, an id that stands twice, or a first turn that
            is too long.
    """
    if chat is None:
        chat = has_chat_template(tokenizer)
    seen: set[str] = set()
    for prompt in prompts:
        if not prompt.turns:
            raise FalconLabError(f"prompt {prompt.id!r} has no turns")
        if prompt.id in seen:
            raise FalconLabError(f"prompt id {prompt.id!r} stands twice; ids must be unique")
        seen.add(prompt.id)
    encoded = [
        EncodedPrompt(p.id, p.category, tuple(p.turns), tokenizer, chat, device, longest)
        for p in prompts
    ]
    if longest is not None:
        for each in encoded:
            each.tokens([])
    return encoded
