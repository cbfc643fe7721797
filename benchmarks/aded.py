"""Milliseconds of ADED's search, over held-out text.

    python benchmarks/aded.py TABLE target=smollm2 corpus=smollm2-dialogues [KEY=VALUE]...

Further keys: ``rounds=400``, ``iterations=150``, ``depth=4``, ``step=2`` (tokens of a round).
``TABLE`` is what ``python -m falcon_lab_aded build`` has written for that target. Times are those
of one thread, so that others on the machine do not matter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import chain
from statistics import fmean, quantiles

from falcon_bench.scripts import names, pairs

DEFAULTS = {"rounds": "400", "iterations": "150", "depth": "4", "step": "2"}


def main(arguments: Sequence[str]) -> dict[str, float]:
    """Search round after round, and print how long it took: a figure and its milliseconds."""
    import torch
    from falcon_lab_aded import AdedConfig
    from falcon_lab_aded.drafter import AdedDrafter

    from falcon_lab.config.schema import TargetConfig
    from falcon_lab.data.corpora import corpus
    from falcon_lab.data.encoding import encode_all
    from falcon_lab.interfaces import BuildContext, Observation
    from falcon_lab.pretraining.target import ensure_target

    tables = names(arguments)
    given = DEFAULTS | pairs(arguments, flags=tables)
    if len(tables) != 1 or {"target", "corpus"} - set(given):
        raise SystemExit(f"name a table, a target and a corpus; see the top of {__file__}")
    target = ensure_target(TargetConfig(name=given["target"]))
    documents = corpus(given["corpus"], split="heldout")
    text = list(chain.from_iterable(one.tokens for one in encode_all(documents, target.tokenizer)))

    begin = time.perf_counter()
    options = {key: int(given[key]) for key in ("iterations", "depth")}
    drafter = AdedDrafter(AdedConfig(table=tables[0], **options), BuildContext(target))
    found = {"opening": 1000 * (time.perf_counter() - begin)}

    step, spent = int(given["step"]), list[float]()
    drafter.reset(torch.tensor(text[0]))
    for at in range(1, min(len(text), 1 + step * int(given["rounds"])), step):
        drafter.observe(Observation(torch.tensor(text[at : at + step]), None))
        begin = time.thread_time()
        drafter.paths()
        spent.append(1000 * (time.thread_time() - begin))
    found |= {"mean": fmean(spent), "95 %": quantiles(spent, n=20)[-1], "longest": max(spent)}
    for name, milliseconds in found.items():
        print(f"{name:8} {milliseconds:8.2f} ms")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
