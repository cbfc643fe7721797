"""A prescribed acceptance is kept to, in a loop that does all its work."""

from __future__ import annotations

import pytest

from fakes.decoding import CONTEXT, chain, generate, speculative
from fakes.drafters import RandomDrafter
from fakes.table_target import TableTarget
from falcon_bench.shapes import Assumed
from falcon_lab.errors import FalconLabError
from falcon_lab.trees.paths import checked
from falcon_lab.trees.templates import named

TARGET = TableTarget(12)


@pytest.mark.parametrize("drafts", [0, 1, 1.5, 2.82, 4])
@pytest.mark.parametrize("tree", ["chain", "k2-8"])
def test_so_many_drafts_are_accepted_as_are_assumed(tree: str, drafts: float) -> None:
    paths = checked(chain(4) if tree == "chain" else named("k2-8", 2))
    rule = Assumed(paths, drafts, CONTEXT.host)
    out = generate(speculative(TARGET, RandomDrafter(12, 2), paths, rule=rule), [1, 2], 400)
    whole = out.rounds[:-8]  # the last trees are cut to what is still to be written
    accepted = [round_.accepted for round_ in whole]
    assert sum(accepted) / len(accepted) == pytest.approx(drafts, abs=0.05)
    assert max(accepted) - min(accepted) <= 1
    assert not rule.lossless


def test_what_is_drafted_along_the_first_candidates_is_what_is_accepted() -> None:
    paths = checked(named("k2-8", 2))
    seen = []

    def look(tokens: list[int], drafted: int, tree: object, accepted: object) -> None:
        if tree is not None:
            seen.append((accepted.path.tolist(), tree.parents.tolist()))  # type: ignore[attr-defined]

    rule = Assumed(paths, 2, CONTEXT.host)
    engine = speculative(TARGET, RandomDrafter(12, 2), paths, rule=rule)
    generate(engine, [1, 2], 60, on_round=look)
    for path, parents in seen[:-4]:
        assert len(path) == 3
        assert [parents[node] for node in path] == [-1, *path[:-1]]
        assert all(
            parents.index(parent) == node for node, parent in zip(path[1:], path, strict=False)
        )


def test_more_than_the_tree_is_deep_is_refused() -> None:
    with pytest.raises(FalconLabError, match="cannot be accepted of depth 4"):
        Assumed(checked(chain(4)), 4.5, CONTEXT.host)


def test_a_tree_without_a_template_is_refused() -> None:
    rule = Assumed(checked(chain(2)), 1, CONTEXT.host)
    with pytest.raises(FalconLabError, match="needs a tree of a template"):
        rule(None, None, None, None)  # type: ignore[arg-type]
