from __future__ import annotations

import pytest
from click.testing import CliRunner
from easyspec_cases import LAYERS, target
from falcon_lab_easyspec.__main__ import main
from falcon_lab_easyspec.costs import ASSUMPTIONS, Parts, measured, pass_seconds, table
from falcon_lab_easyspec.groups import groups_of, stages

from falcon_lab.config.schema import TargetConfig
from falcon_lab.errors import FalconLabError
from falcon_lab.model.target import Target

PARTS = Parts(attention=2.0, network=3.0, rest=10.0, gather=0.5)


@pytest.mark.parametrize(
    ("side_by_side", "devices", "seconds"),
    [
        ([1] * 6, 1, 10 + 6 * 5),
        ([1] * 6, 4, 10 + 6 * 5),  # nothing to share
        ([1, 4, 1], 1, 10 + 6 * 5),
        ([1, 4, 1], 4, 10 + 2 * 5 + (2 + 4 * 3 + 0.5)),
        ([1, 4, 1], 2, 10 + 2 * 5 + (2 * 2 + 4 * 3 + 0.5)),
        ([1, 4, 1], 3, 10 + 2 * 5 + (2 * 2 + 4 * 3 + 0.5)),  # one of them has two
        ([1, 4, 2, 1], 8, 10 + 2 * 5 + (2 + 4 * 3 + 0.5) + (2 + 2 * 3 + 0.5)),
    ],
)
def test_a_pass_costs_what_one_adds_up_by_hand(
    side_by_side: list[int], devices: int, seconds: float
) -> None:
    assert pass_seconds(PARTS, side_by_side, devices) == pytest.approx(seconds)


def test_the_table_says_what_is_gained() -> None:
    *_, one, four = table(PARTS, [1, 4, 1], [1, 4])
    assert one.split()[-1] == "1.00"
    assert float(four.split()[-1]) == pytest.approx(40 / 34.5, abs=0.01)


def test_parts_of_a_target_are_measured() -> None:
    parts = measured(target("llama"), context=8, seconds=0.01)
    assert min(parts.attention, parts.network) >= 0
    assert parts.rest > 0
    layers = stages(groups_of(4, LAYERS), LAYERS)
    assert pass_seconds(parts, layers, 1) == pytest.approx(pass_seconds(parts, [1] * LAYERS, 2))


def test_the_command_prints_its_assumptions_and_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"anything": target("llama")}

    def found(wanted: TargetConfig) -> Target:
        if wanted.name not in known:
            raise FalconLabError(f"{wanted.name} is no target")
        return known[wanted.name]

    monkeypatch.setattr("falcon_lab.pretraining.target.ensure_target", found)
    words = ["--context", "8", "--devices", "2", "--devices", "3", "--seconds", "0.01"]
    done = CliRunner().invoke(main, ["costs", "anything", *words])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(ASSUMPTIONS)
    assert len(done.stdout.splitlines()) == 6
    refused = CliRunner().invoke(main, ["costs", "nothing"])
    assert refused.exit_code == 2
    assert refused.stderr == "falcon-lab: nothing is no target\n"
    for wrong in (["--devices", "0"], ["--gather", "-1"]):
        assert CliRunner().invoke(main, ["costs", "anything", *wrong]).exit_code == 2
