"""Questions for an instruct model to answer: programs, sums, and what people ask an assistant.

    python -m falcon_lab_smollm2.questions 20000 > questions.jsonl
    falcon-lab dialogues --target smollm2 --questions questions.jsonl --out dialogues.jsonl.gz

A model of 135 million parameters seldom asks for a program by itself, and a drafter that never saw
one is slow where speculation pays most. The questions are put together from the patterns of
``questions.toml``; a seed decides which, and none comes twice.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

PATTERNS = Path(__file__).with_suffix(".toml")
TRIES = 200
"""In a row without a new question: then there are no more."""


def questions(count: int, seed: int = 0) -> Iterator[str]:
    """Yield ``count`` different questions, or as many as there are."""
    patterns = tomllib.loads(PATTERNS.read_text(encoding="utf-8"))
    programs, sums, speech = patterns["programs"], patterns["sums"], patterns["talk"]
    speech["slots"]["name"] = sums["names"]
    ways = ((function, programs), (program, programs), (calculation, sums), (talk, speech))
    draw, known, tries = Random(seed), set[str](), 0
    while len(known) < count and tries < TRIES:
        way, given = draw.choices(ways, (3, 1, 4, 4))[0]
        text = way(draw, given)
        tries = tries + 1 if text in known else 0
        if not tries:
            known.add(text)
            yield text


def function(draw: Random, patterns: dict[str, Any]) -> str:
    """Return a function's head with its docstring, to be completed."""
    name, arguments, says = draw.choice(patterns["functions"])
    slots = {key: draw.choice(values) for key, values in patterns["slots"].items()}
    slots |= zip(("shape", "a_shape", "value"), draw.choice(patterns["shapes"]), strict=True)
    slots |= zip(("thing", "example"), draw.choice(patterns["things"]), strict=True)
    doc = says.format(**{key: text.replace("_", " ") for key, text in slots.items()})
    if draw.random() < 0.4:
        more = ("An empty input is allowed.", "The input is not changed.")
        doc += f"\n\n    {draw.choice(more)}\n    "
    head = f"def {name.format(**slots)}({arguments.format(**slots)}:"
    code = f'{head}\n    """{doc}"""\n'
    if "list[" in code and draw.random() < 0.5:
        code = "from typing import List\n\n\n" + code.replace("list[", "List[")
    return str(draw.choice(patterns["styles"])).format(code=code)


def program(draw: Random, patterns: dict[str, Any]) -> str:
    """Return the wish for a program."""
    does, plainly = draw.choice(patterns["does"])
    pattern, language = draw.choice(patterns["tasks"]), draw.choice(patterns["languages"])
    return str(pattern).format(does=does, does_plainly=plainly, language=language)


def calculation(draw: Random, patterns: dict[str, Any]) -> str:
    """Return a sum, in words or in figures."""
    one, two = draw.sample(patterns["names"], 2)
    first, step = draw.randint(2, 48), draw.randint(2, 9)
    numbers = {"a": first, "b": draw.randint(2, 12)}
    numbers |= {"g": first + step, "h": first + 2 * step, "i": first + 3 * step}
    numbers |= {"c": draw.randint(2, 9), "d": draw.randint(60, 960), "e": draw.randint(2, 8)}
    numbers |= {"f": draw.choice((5, 10, 15, 20, 25, 30, 40, 50))}
    pattern = draw.choice(patterns["in_words" if draw.random() < 0.75 else "in_figures"])
    goods, share = draw.choice(patterns["goods"]), draw.choice(("half", "third", "quarter"))
    text = str(pattern).format(one=one, two=two, goods=goods, share=share, **numbers)
    return text.replace(" a half of", " half of") + str(draw.choice(patterns["endings"]))


def talk(draw: Random, patterns: dict[str, Any]) -> str:
    """Return what somebody asks an assistant."""
    slots: dict[str, str] = {}
    for key, values in patterns["slots"].items():
        chosen = draw.sample(values, 3)
        slots |= {key: chosen[0], f"{key}2": chosen[1], f"{key}3": chosen[2]}
    slots |= {"n": str(draw.randint(3, 8)), "m": str(draw.randint(2, 40))}
    slots |= {"year": str(draw.randint(1850, 2020))}
    return str(draw.choice(patterns["patterns"])).format(**slots)


def main(arguments: Sequence[str]) -> None:
    """Write questions as JSON lines; the first argument is how many."""
    for text in questions(int(arguments[0]) if arguments else 1000):
        sys.stdout.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
