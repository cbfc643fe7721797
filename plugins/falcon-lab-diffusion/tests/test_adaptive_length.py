from __future__ import annotations

import pytest
import torch
from falcon_lab_diffusion import AdlConfig
from falcon_lab_diffusion.adaptive_length import AdaptiveLength

from falcon_lab.interfaces import BuildContext, RoundOutcome
from falcon_lab.tree import listed_tree

END = 9


class Host:
    eos_ids = frozenset({END})


def controller(**options: float) -> AdaptiveLength:
    host: object = Host()
    return AdaptiveLength(AdlConfig(**options), BuildContext(host))  # type: ignore[arg-type]


def play(one: AdaptiveLength, drafted: int, accepted: int, end: int | None = None) -> None:
    tokens = [1] * drafted
    if end is not None:
        tokens[end - 1] = END
    tree = listed_tree(torch.tensor(0), tokens, range(drafted), [0.0] * drafted)
    one.update(RoundOutcome(drafted, drafted, accepted, tree=tree))


def test_lengths_are_those_of_the_papers_equations() -> None:
    """k_min 4, k_max 12, delta 3, rho 0.5."""
    one = controller(least=4, most=12, step=3, decay=0.5)
    assert one.budget().depth == 12
    # Generated 12 and accepted 12: both averages are 6, so k = 6 + 3.
    play(one, 12, 12)
    assert (one.generated, one.accepted, one.length) == (6, 6, 9)
    # Generated 9 and accepted 1: 7.5 and 3.5, so k = 7.5, rounded to the even 8.
    play(one, 9, 1)
    assert (one.generated, one.accepted, one.length) == (7.5, 3.5, 8)
    # The fifth token ends the text, so 4 are generated; 4 accepted: 5.75 and 3.75, k = 6.
    play(one, 5, 4, end=5)
    assert (one.generated, one.accepted, one.length) == (5.75, 3.75, 6)
    # 1 generated, none accepted: 3.375 and 1.875, and k is no less than 4.
    play(one, 1, 0)
    assert (one.generated, one.accepted, one.length) == (3.375, 1.875, 4)
    play(one, 0, 0)
    assert one.length == 4, "a round without drafts says nothing"
    one.reset()
    assert (one.budget().depth, one.generated, one.accepted) == (12, 0, 0)


def test_the_length_is_no_more_than_the_greatest() -> None:
    one = controller(least=2, most=5, step=10)
    play(one, 5, 5)
    assert one.length == 5
    with pytest.raises(ValueError, match="least is 6"):
        controller(least=6, most=5)
