"""Silence other libraries' tips on the command line; progress and warnings stay.

Set up before the heavy imports, which are not needed for it, and undone at the end: a program that
calls the library is not touched.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

BAR_DELAY = "1"
"""Seconds before a progress bar of tqdm appears: what is done by then needs none."""
BAR_PAUSE = "60"
"""Seconds between two states of another library's bar where stderr is no terminal."""

TALKATIVE = {
    "lightning.pytorch.utilities.rank_zero": ("💡 Tip:", "TPU available"),
    # Of its own call of generate, inside assisted generation.
    "transformers.generation.utils": ("Passing `generation_config` together with",),
    "lightning.pytorch.trainer.connectors.checkpoint_connector": ("`weights_only` was not set",),
}
"""Logger -> beginnings of the messages that tell the user nothing."""

POINTLESS = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning's business
    r"You passed in a `val_dataloader` but have no",  # target pre-training validates at its end
    r"The '?\w+'? does not have many workers",  # the data are in memory
    r"It is recommended to use `self\.log\('val/",  # sums are reduced before they are logged
    r"The number of training batches \(\d+\) is smaller than the logging interval",
)
"""Beginnings of Python warnings that the user can do nothing about."""


@contextmanager
def third_party_tips_silenced() -> Iterator[None]:
    """Silence third parties' tips inside the block."""
    bars = {"TQDM_DELAY": BAR_DELAY}
    if not sys.stderr.isatty():
        bars["TQDM_MININTERVAL"] = BAR_PAUSE
    added = {name: text for name, text in bars.items() if name not in os.environ}
    os.environ.update(added)
    filters = [(logging.getLogger(name), _Without(texts)) for name, texts in TALKATIVE.items()]
    for logger, each in filters:
        logger.addFilter(each)
    try:
        with warnings.catch_warnings():
            for text in POINTLESS:
                warnings.filterwarnings("ignore", message=text)
            yield
    finally:
        for logger, each in filters:
            logger.removeFilter(each)
        for name in added:
            os.environ.pop(name, None)


class _Without(logging.Filter):
    """Let no message through that begins with one of some texts."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.beginnings)
