"""Answers in the JSONL format of MT-bench and Spec-Bench, for scorers that read it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from falcon_lab.errors import FalconLabError
from falcon_lab.evaluation.rows import PromptRow
from falcon_lab.whole_file import replacing


def write_answers(path: Path, model_id: str, rows: Iterable[PromptRow]) -> None:
    """Write one line a prompt, the file whole or not at all.

    ``accept_lengths`` counts the tokens that each verification brought, the target's own among
    them, over all turns, and is 1 a token for plain decoding, as Spec-Bench has it.

    Args:
        path: the file.
        model_id: names the method.
        rows: what it answered.

    Raises:
        FalconLabError: the file cannot be written; what was there before is still there.
    """
    now = time.time()
    lines = [json.dumps(answer(model_id, row, now), ensure_ascii=False) for row in rows]
    try:
        with replacing(path) as temporary:
            temporary.write_text("".join(line + "\n" for line in lines), "utf-8")
    except OSError as error:
        raise FalconLabError(f"{path}: answers cannot be written ({error})") from error


def answer(model_id: str, row: PromptRow, tstamp: float) -> dict[str, Any]:
    """One line of the file."""
    emitted = [turn.rounds.emitted or [1] * len(turn.tokens) for turn in row.turns]
    return {
        # MT-bench numbers its questions, and scorers look them up by number.
        "question_id": int(row.prompt) if row.prompt.isdecimal() else row.prompt,
        "category": row.category,
        "answer_id": uuid.uuid5(uuid.NAMESPACE_URL, f"{model_id}/{row.prompt}").hex,
        "model_id": model_id,
        "choices": [
            {
                "index": 0,
                "turns": [turn.text for turn in row.turns],
                "decoding_steps": [len(steps) for steps in emitted],
                "new_tokens": [len(turn.tokens) for turn in row.turns],
                "wall_time": [turn.times.wall for turn in row.turns],
                "accept_lengths": [length for steps in emitted for length in steps],
            }
        ],
        "tstamp": tstamp,
    }
