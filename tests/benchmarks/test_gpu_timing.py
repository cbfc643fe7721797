"""Rates of loops with known times."""

from __future__ import annotations

import pytest
import torch

from fakes.clock import Clock
from falcon_bench.gpu_timing import rates
from falcon_lab.decoding.generation import Round, Seconds
from measuring import Scripted


class Timed(Scripted):
    """Takes so long for the first token and for each further one."""

    def __init__(self, clock: Clock, first: float, each: float, **settings: object) -> None:
        super().__init__(list(range(1, 10)), **settings)  # type: ignore[arg-type]
        self.clock, self.first, self.each = clock, first, each

    def generate(self, prompt: torch.Tensor, *, max_new_tokens: int, **settings: object) -> object:  # type: ignore[override]
        out = super().generate(prompt, max_new_tokens=max_new_tokens, **settings)  # type: ignore[arg-type]
        self.clock.now += self.first + self.each * (len(out.tokens) - 1)
        return out


def test_a_loop_s_rate_leaves_the_reading_of_the_prompt_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    seconds = Seconds(
        prefill=2.0, draft=1.0, verify=6.0, accept=0.2, commit=0.3, overhead=0.5, total=8.0
    )
    round_ = Round(nodes=3, depth=2, passes=1, accepted=1, emitted=2)
    ours = Timed(clock, 2.0, 1.0, seconds=seconds, rounds=[round_] * 4)
    theirs = Timed(clock, 5.0, 3.0)
    theirs.opaque = True
    said: list[str] = []
    found = rates(
        {"ours": ours, "theirs": theirs},
        torch.tensor([1, 2]),
        9,
        repeats=2,
        reading=Timed(clock, 5.0, 3.0),
        announce=said.append,
    )
    assert found["ours"].seconds == pytest.approx(1.0)
    assert found["theirs"].seconds == pytest.approx(3.0)
    assert found["theirs"].round is None
    assert found["ours"].tau == pytest.approx(2.0)
    assert found["ours"].round == pytest.approx(
        {"draft": 0.25, "verify": 1.5, "accept": 0.05, "commit": 0.075, "overhead": 0.125}
    )
    assert found["ours"].passes == 1
    assert found["ours"].overhead == pytest.approx(12.5)
    assert found["ours"].as_dict()["tokens_per_second"] == pytest.approx(1.0)
    assert said == ["warming up: ours", "warming up: theirs"]
    assert len(ours.prompts) == 3  # once unseen, twice timed
