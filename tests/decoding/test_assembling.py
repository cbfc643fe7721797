import pytest
from torch import nn

from fakes.drafters import RandomDrafter
from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.assembling import choose_drafter, choose_target
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import BuildContext
from falcon_lab.plugins.builtins import FalconConfig
from tiny_models import tiny_target


@pytest.mark.parametrize(
    ("asked", "target_is", "drafter_is"),
    [("none", False, False), ("drafter", False, True), ("all", True, True)],
)
def test_the_configuration_says_what_is_compiled(
    asked: str, target_is: bool, drafter_is: bool
) -> None:
    target, decoding = tiny_target(), DecodingConfig(compile=asked)
    drafter = FalconDrafter(FalconConfig(), BuildContext(host=target))
    assert (choose_target(target, decoding, print) is not target) is target_is
    chosen = choose_drafter(drafter, decoding, print)
    assert (chosen is not drafter) is drafter_is
    assert chosen.is_compiled is drafter_is


def test_a_drafter_that_has_nothing_to_compile_stays_as_it_is() -> None:
    drafter, said = RandomDrafter(5, 2), list[str]()
    assert choose_drafter(drafter, DecodingConfig(compile="all"), said.append) is drafter
    assert said == []
    assert not drafter.is_compiled


class Weighing(nn.Linear, RandomDrafter):
    """Has weights, and nothing that compiles them."""

    def __init__(self) -> None:
        nn.Linear.__init__(self, 2, 2)
        RandomDrafter.__init__(self, 5, 2)


@pytest.mark.parametrize(("asked", "lines"), [("none", 0), ("drafter", 1), ("all", 1)])
def test_a_drafter_with_weights_that_cannot_be_compiled_says_so(asked: str, lines: int) -> None:
    drafter, said = Weighing(), list[str]()
    assert choose_drafter(drafter, DecodingConfig(compile=asked), said.append) is drafter
    assert said == ["Weighing is not compiled: it has no passes that could be"] * lines
