"""How fast an instruct target writes dialogues side by side, over one by one, on this machine.

    python benchmarks/dialogues.py [KEY=VALUE]...

Keys: ``sizes=1,64`` texts side by side and ``dialogues=3,128``, how many of them are written with
each; ``answer=128`` tokens at the most; ``clock=wall``, or ``cpu`` for the seconds that a core
worked for this process, on a machine that is busy; any other key is the configuration's. Questions
are written as well, and prompts are read: a rate is that of answer tokens, dropped ones counted,
over all the time. The table is printed; results go to
``benchmarks/results/DATE-dialogues-DTYPE-DEVICE.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from falcon_bench.scripts import RESULTS, numbers, results_path, split, tell

OWN = {"sizes": "1,64", "dialogues": "3,128", "answer": "128", "clock": "wall"}
SETTINGS = ("target.name=smollm2", "target.lean=true", "evaluation.threads=1")


def main(arguments: Sequence[str], folder: Path = RESULTS) -> Path:
    """Measure, print, and write the results into ``folder``; their file."""
    from falcon_lab.config.load import load_experiment
    from falcon_lab.config.schema import dtype_name
    from falcon_lab.data.dialogues import ChatForm, Dialogist, DialogueSettings
    from falcon_lab.measure.provenance import header, target_of
    from falcon_lab.measure.results import write_results
    from falcon_lab.pretraining.target import ensure_target
    from falcon_lab.timing import Stopwatch, torch_threads

    given, overrides = split(arguments, OWN)
    settings = OWN | given
    experiment = load_experiment(None, [*SETTINGS, *overrides])
    target, rows = ensure_target(experiment.target, tell), list[dict[str, Any]]()
    threads = experiment.evaluation.threads
    results = header(target, threads=threads) | {"target": target_of(target)}
    counts = zip(numbers(settings["sizes"]), numbers(settings["dialogues"]), strict=True)
    with torch_threads(threads):
        for size, count in counts:
            chosen = DialogueSettings(
                answer_tokens=int(settings["answer"]), batch_size=size, part=count
            )
            dialogist = Dialogist(target, ChatForm.of(target), chosen)
            lengths: list[int] = []
            with Stopwatch(target.device) as watch:
                part = dialogist.part(0, set(), lengths.append)
            seconds = getattr(watch, settings["clock"])
            rate = sum(lengths) / seconds
            row = {
                "side_by_side": size,
                "begun": count,
                "kept": len(part.lines),
                "answer_tokens": sum(lengths),
                "seconds": round(seconds, 2),
                "tokens_per_second": round(rate, 1),
            }
            first = rows[0]["tokens_per_second"] if rows else rate
            rows.append(row | {"over_the_first": round(rate / first, 2)})
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()))
    results |= {"settings": settings, "rows": rows}
    dtype = dtype_name(target.dtype)
    return write_results(results_path(folder, f"dialogues-{dtype}", results), results)


if __name__ == "__main__":
    print(main(sys.argv[1:]))
