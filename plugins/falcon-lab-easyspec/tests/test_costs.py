from __future__ import annotations

import pytest
from easyspec_cases import LAYERS, target
from falcon_lab_easyspec.costs import ASSUMPTIONS, Parts, main, measured, pass_seconds, table
from falcon_lab_easyspec.groups import groups_of, stages

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


def test_the_command_prints_its_assumptions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("falcon_lab_easyspec.costs.load_target", lambda wanted: target("llama"))
    main(["anything", "--context", "8", "--devices", "2", "3", "--seconds", "0.01"])
    said = capsys.readouterr().out
    assert said.startswith(ASSUMPTIONS)
    assert len(said.splitlines()) == 6
    for wrong in (["--devices", "0"], ["--gather", "-1"]):
        with pytest.raises(SystemExit, match="2"):
            main(["anything", *wrong])
