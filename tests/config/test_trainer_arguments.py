from __future__ import annotations

from pathlib import Path

import pytest

from falcon_lab.config.trainer import (
    RESERVED,
    STEPS,
    check_trainer,
    trainer_annotations,
    training_steps,
)
from falcon_lab.errors import ConfigError, FalconLabError


def refusal(**section: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check_trainer(section)
    return str(caught.value)


def test_the_arguments_read_are_those_of_the_installed_trainer() -> None:
    import inspect

    from lightning import Trainer

    assert list(trainer_annotations()) == list(inspect.signature(Trainer).parameters)


def test_arguments_of_many_types_pass_as_they_are() -> None:
    section = {
        "max_steps": 10,
        "precision": "bf16-mixed",
        "devices": [0, 1],
        "limit_val_batches": 2,
        "gradient_clip_val": 1,
        "overfit_batches": 0.5,
        "deterministic": "warn",
        "max_time": {"minutes": 3},
        "max_epochs": None,
        "enable_progress_bar": False,
        "strategy": "ddp",
    }
    assert check_trainer(section) == section


def test_a_whole_float_becomes_an_int_only_where_no_float_is_taken() -> None:
    checked = check_trainer({"max_steps": 4.0, "limit_val_batches": 1.0})
    assert checked == {"max_steps": 4, "limit_val_batches": 1.0}
    assert [type(value) for value in checked.values()] == [int, float]


def test_an_unknown_argument_is_named_with_the_nearest() -> None:
    assert refusal(max_stepz=3).endswith("Trainer; did you mean 'max_steps'?")


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_what_the_run_sets_itself_is_refused_with_what_to_use(name: str) -> None:
    assert refusal(**{name: True}) == f"trainer.{name}: is set by the run; {RESERVED[name]}"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("max_steps", "abc", "int"),
        ("max_steps", 4.5, "int"),
        ("max_steps", True, "int"),
        ("barebones", "yes", "bool"),
        ("accelerator", 3, "str"),
        ("limit_val_batches", "all", "float or int"),
    ],
)
def test_a_wrong_type_is_refused_with_the_right_one(name: str, value: object, wanted: str) -> None:
    assert refusal(**{name: value}).endswith(f"is {value!r}; Lightning wants {wanted}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_steps", value) for value in (0, -1, -5, None)),
        *(("max_epochs", value) for value in (0, -2)),
        ("limit_train_batches", 0),
        ("limit_train_batches", -0.5),
        ("accumulate_grad_batches", 0),
        ("gradient_clip_val", -1.0),
        ("gradient_clip_val", float("inf")),
        ("check_val_every_n_epoch", 0),
        ("fast_dev_run", True),
        ("num_nodes", 0),
    ],
)
def test_what_trains_nothing_or_without_limit_is_refused_by_name(name: str, value: object) -> None:
    assert refusal(**{name: value}).startswith(f"trainer.{name}: ")


def test_a_training_without_steps_of_its_own_has_the_default() -> None:
    assert training_steps({"max_epochs": 2}) == STEPS
    assert training_steps({"max_steps": 7}) == 7


def test_a_lightning_that_is_not_there_or_not_lightning_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import falcon_lab.config.trainer as module

    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FalconLabError, match="lightning is not installed"):
        check_trainer({})
