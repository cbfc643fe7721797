from __future__ import annotations

import itertools
import math

import pytest
import torch
from falcon_lab_diffusion import CpsConfig
from falcon_lab_diffusion.path_search import Candidate, Lattice, PathSearch, search
from falcon_lab_diffusion.trigrams import Trigrams, count_trigrams

from falcon_lab.interfaces import Budget, BuildContext, DraftOutput, RoundContext
from falcon_lab.sampling import Sampling

END = 9


def lattice_of(seed: int, places: int = 4, width: int = 3) -> Lattice:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(places):
        tokens = torch.randperm(8, generator=generator)[:width].tolist()
        log_q = torch.randn(width + 1, generator=generator).log_softmax(-1).tolist()
        found.append([*map(Candidate, [*tokens, END], log_q)])
    return found


def trigrams(seed: int) -> Trigrams:
    generator = torch.Generator().manual_seed(seed)
    return count_trigrams([torch.randint(0, 10, (60,), generator=generator).tolist()])


def score(
    path: tuple[Candidate, ...], before: list[int], model: Trigrams | None, weight: float
) -> float:
    """S of the paper, of a path all of whose places are chosen."""
    total, written, ended = 0.0, list(before), False
    for token, log_q in path:
        total += weight * log_q
        if model is not None and not ended:
            total += (1 - weight) * model.log_probability(written, token)
        written.append(token)
        ended = ended or token == END
    return total


def complete(path: tuple[Candidate, ...]) -> bool:
    """Whether nothing but the end follows the end."""
    ends = [token == END for token, _ in path]
    return ends == sorted(ends)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_a_wide_beam_finds_what_brute_force_finds(seed: int, weight: float) -> None:
    lattice, before, model = lattice_of(seed), [3, 1], trigrams(seed)
    ngrams = None if weight == 1 else model
    found = search(lattice, before, beam=10**6, weight=weight, ngrams=ngrams, ends={END})
    paths = [path for path in itertools.product(*lattice) if complete(path)]
    ranked = sorted(paths, key=lambda path: score(path, before, ngrams, weight), reverse=True)
    assert len(found) == len(ranked)
    for ours, theirs in zip(found[:20], ranked, strict=False):
        assert ours.score == pytest.approx(score(theirs, before, ngrams, weight))
    best = [token for token, _ in ranked[0]]
    length = best.index(END) + 1 if END in best else len(best)
    assert list(found[0].tokens) == best[:length]
    narrow = search(lattice, before, beam=1, weight=weight, ngrams=ngrams, ends={END})
    assert narrow[0].score <= found[0].score + 1e-9


def test_a_trigram_model_mends_what_places_choose_alone() -> None:
    """Both words are a little likelier crossed, which no text has."""
    model = count_trigrams([[1, 2, 3]] * 9 + [[1, 4, 5]] * 9)
    lattice = [
        [Candidate(2, math.log(0.5)), Candidate(4, math.log(0.4))],
        [Candidate(5, math.log(0.5)), Candidate(3, math.log(0.4))],
    ]
    alone = search(lattice, [1], beam=3, weight=0.5, ngrams=None)
    assert alone[0].tokens == (2, 5)
    assert search(lattice, [1], beam=3, weight=0.5, ngrams=model)[0].tokens == (2, 3)


def output(*rows: list[float]) -> DraftOutput:
    return DraftOutput(torch.tensor([rows]).log())


def start(builder: PathSearch, **budget: int) -> bool:
    context = RoundContext(torch.tensor(3), Budget(**budget), Sampling(), torch.Generator())
    return builder.start(context) is not None


class Host:
    eos_ids = frozenset({END})


def build(**options: float) -> PathSearch:
    host: object = Host()
    return PathSearch(CpsConfig(**options), BuildContext(host, 4, 1))  # type: ignore[arg-type]


def test_candidates_are_the_fewest_with_the_mass_and_the_end() -> None:
    row = [0.5, 0.25, 0.1, 0.05, 0.04, 0.03, 0.01, 0.01, 0.01, 0.001]
    for options, expected in (
        ({"mass": 0.7}, [0, 1, END]),
        ({"mass": 0.8}, [0, 1, 2, END]),
        ({"mass": 1.0, "candidates": 3}, [0, 1, 2, END]),
    ):
        builder = build(beam=9, paths=9, **options)
        assert start(builder)
        builder.grow(output(row))
        assert sorted(builder.finish().tokens[1:].tolist()) == expected


def test_the_best_paths_share_a_tree() -> None:
    builder = build(beam=4, paths=2, mass=0.9)
    start(builder, depth=2)
    builder.grow(output([0.9, 0.1], [0.6, 0.4], [1.0, 0.0]))
    tree = builder.finish()
    assert tree.tokens.tolist() == [3, 0, 0, 1]
    assert tree.parents.tolist() == [-1, 0, 1, 1]
    assert tree.proposal == "deterministic"
    torch.testing.assert_close(tree.log_q.exp(), torch.tensor([1, 0.9, 0.6, 0.4]))
    start(builder, nodes=1)
    builder.grow(output([0.9, 0.1], [0.6, 0.4]))
    assert builder.finish().tokens.tolist() == [3, 0]
    assert not start(builder, passes=0)
    assert builder.finish().nodes == 1


def test_an_empty_pass_is_an_empty_tree() -> None:
    builder = build()
    start(builder)
    builder.grow(DraftOutput(torch.zeros(1, 0, 12)))
    assert builder.finish().nodes == 1
