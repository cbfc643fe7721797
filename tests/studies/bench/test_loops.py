"""The rows of a benchmark that are our own loops."""

from __future__ import annotations

from typing import Any

import pytest

from falcon_lab.config.load import load_experiment
from falcon_lab.measure.engines import Setup
from falcon_lab.plugins.discovery import load_components
from falcon_lab.studies.bench.loops import EAGER, LEAN, PLAIN, benchmark
from falcon_lab.testing.compiling import Pretend
from tiny_models import tiny_target


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_target_s_plain_loop_stands_beside_the_one_as_it_is(compiled: bool) -> None:
    target: Any = tiny_target()
    if compiled:
        target = target.compiled(lambda line: None, Pretend())
    setup = Setup(load_experiment(None, []), target, load_components())
    found = benchmark(setup, [PLAIN], attempt=lambda engine: None)
    others = {name: engine for name, engine in found.engines.items() if name != PLAIN}
    assert set(others) == ({EAGER, LEAN} if compiled else {LEAN})
    assert found.engines[PLAIN].target.is_compiled is compiled  # type: ignore[attr-defined]
    assert not any(engine.target.is_compiled for engine in others.values())  # type: ignore[attr-defined]
