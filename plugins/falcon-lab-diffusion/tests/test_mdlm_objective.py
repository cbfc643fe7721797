from __future__ import annotations

import torch
from falcon_lab_diffusion import MdlmConfig
from falcon_lab_diffusion.objective import MdlmObjective, streaks

from falcon_lab.interfaces import BuildContext, LabelledRows


def rows(known: torch.Tensor | None = None) -> LabelledRows:
    """Two blocks of three and two rows, whose target's tokens are 0, 1, 0 and 1, 1."""
    q = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.1, 0.9], [0.75, 0.25], [0.4, 0.6]])
    teacher = torch.tensor([[1.0, 0], [0, 1], [1, 0], [0, 1], [0, 1]])
    tokens = torch.tensor([0, 0, -100, 1, 1])
    slot, group = torch.tensor([0, 1, 2, 0, 2]), torch.tensor([4, 4, 4, 6, 6])
    given = (tokens, torch.Generator(), slot, known)
    return LabelledRows(None, q.log(), torch.zeros(5, 1), teacher, *given, group=group)


def test_streaks_are_products_of_a_block_s_rows() -> None:
    expected = -torch.tensor([0.5, 0.5 * 0.8, 0.5 * 0.8 * 0.1, 0.25, 0.25 * 0.6])
    torch.testing.assert_close(streaks(rows()), expected)
    known = torch.tensor([True, False, True, True, True])
    expected[1:3] = 0
    torch.testing.assert_close(streaks(rows(known)), expected)


def test_the_bound_is_the_cross_entropy_with_its_label() -> None:
    host: object = None
    context = BuildContext(host)  # type: ignore[arg-type]
    data = MdlmObjective(MdlmConfig(), context)(rows())["bound"]
    expected = -torch.tensor([0.5, 0.2, 1.0, 0.25, 0.6]).log()
    torch.testing.assert_close(data, expected)
    target = MdlmObjective(MdlmConfig(label="target"), context)(rows())["bound"]
    torch.testing.assert_close(target, -torch.tensor([0.5, 0.8, 0.1, 0.25, 0.6]).log())
    both = MdlmObjective(MdlmConfig(streak=0.5), context)
    assert both.whole_groups
    assert sorted(both(rows())) == sorted(both.weights) == ["bound", "streak"]
