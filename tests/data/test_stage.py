"""The data stage of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from falcon_lab.config.schema import DataConfig
from falcon_lab.data.stage import prepare_data
from falcon_lab.errors import FalconLabError
from falcon_lab.plugins.hooks import Component
from falcon_lab.plugins.registry import Components
from tiny_models import tiny_target


def test_a_store_that_is_of_no_use_to_the_drafter_is_refused_before_it_is_filled(
    tmp_path: Any,
) -> None:
    def build(config: Any, context: Any) -> Any:
        return SimpleNamespace(taps=(1,), block=1)

    with pytest.raises(FalconLabError, match=r"data\.feature_store=null"):
        prepare_data(
            DataConfig(corpus="gone", feature_store=str(tmp_path / "store")),
            tiny_target(),
            drafter={"name": "mine"},
            components=Components([Component("drafter", "mine", build, None, "mine", "1")]),
            announce=lambda line: None,
        )
    assert not (tmp_path / "store").exists()
