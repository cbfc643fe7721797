from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from falcon_lab.config.limits import RANGES, WORDS, Range, check_limits
from falcon_lab.config.schema import Experiment, PretrainingConfig
from falcon_lab.errors import ConfigError


def keys(section: Any, prefix: str = "") -> Iterator[str]:
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from keys(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def complete() -> Experiment:
    experiment = Experiment()
    experiment.target.pretraining = PretrainingConfig()
    return experiment


def with_value(key: str, value: Any) -> Experiment:
    experiment = complete()
    *path, last = key.split(".")
    section: Any = experiment
    for name in path:
        section = getattr(section, name)
    setattr(section, last, value)
    return experiment


def test_every_limit_is_of_a_key_that_exists() -> None:
    assert {*RANGES, *WORDS} <= set(keys(complete()))


def test_the_defaults_are_within_the_limits() -> None:
    check_limits(complete())


@pytest.mark.parametrize("key", sorted(RANGES))
def test_a_number_below_its_range_is_refused(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_limits(with_value(key, RANGES[key].low - 1))
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("distillation.optimizer.lr", 0.0),
        ("decoding.kv_memory", 0.0),
        ("evaluation.top_p", 0.0),
        ("evaluation.top_p", 1.1),
        ("distillation.optimizer.betas", [0.9]),
        ("distillation.optimizer.betas", [0.9, 1.0]),
        ("target.dtype", "float8"),
        ("target.device", "gpu"),
        ("target.pretraining.model.heads", 3),
        ("wandb.mode", "of"),
        ("stages", ["data", "train"]),
        ("name", " "),
    ],
)
def test_what_cannot_work_is_refused_by_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        check_limits(with_value(key, value))
    assert caught.value.key.startswith(key)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_devices_are_written_as_torch_writes_them(device: str) -> None:
    check_limits(with_value("target.device", device))


def test_a_range_says_what_it_holds() -> None:
    assert str(Range(1)) == "at least 1"
    assert str(Range(0, 1, above=True)) == "more than 0 and at most 1"
    assert 1 in Range(0, 1, above=True)
    assert 0 not in Range(0, 1, above=True)
