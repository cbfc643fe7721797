import itertools

import pytest

from falcon_lab.config.schema import OptimizerConfig
from falcon_lab.distill.training import lr_factor


def test_the_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    config = OptimizerConfig(warmup_steps=4, final_lr=0.1)
    factors = [lr_factor(step, 20, config) for step in range(21)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[12] == pytest.approx(0.55)
    assert factors[20] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(factors[4:]))
    assert lr_factor(99, 20, config) == pytest.approx(0.1)
