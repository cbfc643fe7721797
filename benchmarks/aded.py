"""Milliseconds of ADED's search, and what it drafts of held-out text.

    python benchmarks/aded.py TABLE target=smollm2 corpus=smollm2-dialogues [KEY=VALUE]...

``TABLE`` is what ``python -m falcon_lab_aded build`` has written for that target. Further keys are
options of the drafter, and ``rounds=10000`` at the most. The held-out documents are replayed: a
round accepts what is drafted of the text that is there, so that without the target tau is what
greedy decoding would have if the target wrote that text. Times are those of one thread, so that
others on the machine do not matter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import fmean, quantiles
from typing import TYPE_CHECKING

from falcon_bench.scripts import names, pairs

if TYPE_CHECKING:
    from falcon_lab_aded.drafter import AdedDrafter

    from falcon_lab.data.encoding import Encoded

Turn = tuple[float, int, int]
"""Milliseconds of a round's search, nodes that it drafted, and how many were accepted."""


def main(arguments: Sequence[str]) -> dict[str, float]:
    """Replay held-out documents, and print the figures."""
    from falcon_lab_aded import AdedConfig
    from falcon_lab_aded.drafter import AdedDrafter

    from falcon_lab.config.schema import TargetConfig
    from falcon_lab.data.corpora import corpus
    from falcon_lab.data.encoding import encode_all
    from falcon_lab.fields import options, parse_value
    from falcon_lab.interfaces import BuildContext
    from falcon_lab.pretraining.target import ensure_target

    tables = names(arguments)
    given = pairs(arguments, flags=tables)
    if len(tables) != 1 or {"target", "corpus"} - set(given):
        raise SystemExit(f"name a table, a target and a corpus; see the top of {__file__}")
    most = int(given.pop("rounds", "10000"))
    target = ensure_target(TargetConfig(name=given.pop("target")))
    documents = corpus(given.pop("corpus"), split="heldout")
    values = {"table": tables[0]} | {key: parse_value(text) for key, text in given.items()}

    begin = time.perf_counter()
    drafter = AdedDrafter(options(AdedConfig, values, "drafter"), BuildContext(target))
    opening = 1000 * (time.perf_counter() - begin)
    encoded = encode_all(documents, target.tokenizer)
    turns = (turn for document in encoded for turn in replayed(drafter, document))
    spent, nodes, accepted = zip(*islice(turns, most), strict=True)
    found = {
        "opening, ms": opening,
        "search, ms": fmean(spent),
        "of 95 %, ms": quantiles(spent, n=20)[-1],
        "rounds": len(spent),
        "nodes": fmean(nodes),
        "tau": 1 + fmean(accepted),
    }
    for name, figure in found.items():
        print(f"{name:12}{figure:10.2f}")
    return found


def replayed(drafter: AdedDrafter, document: Encoded) -> Iterator[Turn]:
    """Yield the rounds that would write a document from where its loss mask begins on."""
    import torch

    from falcon_lab.interfaces import Observation

    text = document.tokens
    at = max(1, document.loss_mask.index(True)) + 1
    drafter.reset(torch.tensor(text[0]))
    drafter.observe(Observation(torch.tensor(text[1:at]), None))
    while at < len(text):
        begin = time.thread_time()
        paths = drafter.paths()
        spent = 1000 * (time.thread_time() - begin)
        found = {tuple(path) for path in paths}
        accepted = 0
        while at + accepted + 1 < len(text) and tuple(text[at : at + accepted + 1]) in found:
            accepted += 1
        yield spent, len(found), accepted
        drafter.observe(Observation(torch.tensor(text[at : at + accepted + 1]), None))
        at += accepted + 1


if __name__ == "__main__":
    main(sys.argv[1:])
