import pytest

from fakes.drafters import RandomDrafter
from falcon_lab.builtins import FalconConfig
from falcon_lab.compiling.choice import choose_drafter, choose_target
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.protocols import BuildContext
from falcon_lab.schema import DecodingConfig
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
    assert (choose_drafter(drafter, decoding, print) is not drafter) is drafter_is


def test_a_drafter_that_has_nothing_to_compile_stays_as_it_is() -> None:
    drafter = RandomDrafter(5, 2)
    assert choose_drafter(drafter, DecodingConfig(compile="all"), print) is drafter
