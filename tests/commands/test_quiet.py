from __future__ import annotations

import logging
import os
import warnings

import pytest

from falcon_lab.commands.quiet import TALKATIVE, third_party_tips_silenced

LIGHTNING = "lightning.pytorch.utilities.rank_zero"


def test_tips_are_silenced_and_news_is_not(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger(LIGHTNING)
    with third_party_tips_silenced(), caplog.at_level(logging.INFO, LIGHTNING):
        log.info("💡 Tip: install something")
        log.info("GPU available: True")
        log.warning("the loss is odd")
    assert caplog.messages == ["GPU available: True", "the loss is odd"]


def test_warnings_that_help_nobody_are_ignored_and_others_are_not() -> None:
    with third_party_tips_silenced(), warnings.catch_warnings(record=True) as caught:
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use", stacklevel=1)
        warnings.warn("the disk is nearly full", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["the disk is nearly full"]


def test_everything_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DELAY", raising=False)
    filters = list(warnings.filters)
    with third_party_tips_silenced():
        assert float(os.environ["TQDM_DELAY"]) > 0
    assert "TQDM_DELAY" not in os.environ
    assert warnings.filters == filters
    assert not any(logging.getLogger(name).filters for name in TALKATIVE)


def test_a_delay_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DELAY", "0")
    with third_party_tips_silenced():
        assert os.environ["TQDM_DELAY"] == "0"
    assert os.environ["TQDM_DELAY"] == "0"
