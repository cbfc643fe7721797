from __future__ import annotations

import pytest

from falcon_lab.environment import check_environment, is_worker, wandb_mode, wandb_run, world_size
from falcon_lab.errors import FalconLabError


@pytest.mark.parametrize(
    "name", ["LOCAL_RANK", "RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "HF_HUB_DOWNLOAD_TIMEOUT"]
)
@pytest.mark.parametrize("text", ["abc", "-1", "1.5", "9" * 30, "9" * 5000, "0x1", "1 2", "٣"])
def test_a_number_that_is_none_is_refused_by_its_variable(name: str, text: str) -> None:
    with pytest.raises(FalconLabError) as caught:
        check_environment({name: text})
    assert str(caught.value).startswith(f"{name} is ")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"LOCAL_RANK": "1", "RANK": "3", "WORLD_SIZE": "4"},
        {"OMP_NUM_THREADS": "4,2", "MKL_NUM_THREADS": ""},
        {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "TRUE", "HF_DATASETS_OFFLINE": ""},
        {"RANK": "0"},
    ],
)
def test_what_launchers_and_users_set_is_taken(variables: dict[str, str]) -> None:
    check_environment(variables)


@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_RANK": ""},
        {"OMP_NUM_THREADS": "100000"},
        {"OMP_NUM_THREADS": "4,"},
        {"HF_HUB_OFFLINE": "offline"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "1"},
        {"WORLD_SIZE": "0"},
    ],
)
def test_what_would_be_taken_for_something_else_is_refused(variables: dict[str, str]) -> None:
    with pytest.raises(FalconLabError, match=next(iter(variables))):
        check_environment(variables)


def test_a_process_is_a_worker_unless_it_is_the_first() -> None:
    assert not is_worker({})
    assert not is_worker({"LOCAL_RANK": "0", "RANK": "0"})
    assert is_worker({"LOCAL_RANK": "0", "RANK": "2"})
    assert is_worker({"LOCAL_RANK": "1"})
    assert world_size({}) == 1
    assert world_size({"WORLD_SIZE": "4"}) == 4


@pytest.mark.parametrize(
    ("configured", "environment", "mode"),
    [
        (None, {}, "offline"),
        ("online", {}, "online"),
        ("online", {"WANDB_MODE": "disabled"}, "disabled"),
        (None, {"WANDB_MODE": "online"}, "online"),
        (None, {"WANDB_SWEEP_ID": "s"}, "online"),
        ("offline", {"WANDB_SWEEP_ID": "s"}, "offline"),
        (None, {"WANDB_SWEEP_ID": "s", "WANDB_MODE": "offline"}, "offline"),
        (None, {"WANDB_MODE": "dryrun"}, "offline"),
    ],
)
def test_the_mode_is_the_environments_the_experiments_or_the_sweeps(
    configured: str | None, environment: dict[str, str], mode: str
) -> None:
    assert wandb_mode(configured, environment) == mode


@pytest.mark.parametrize(
    ("configured", "variables", "who"),
    [
        ("onlin", {}, "wandb.mode"),
        ("onlin", {"WANDB_MODE": "of"}, "WANDB_MODE"),
        (None, {"WANDB_MODE": "0"}, "WANDB_MODE"),
    ],
)
def test_a_mode_that_wandb_does_not_have_is_refused_with_who_asked_for_it(
    configured: str | None, variables: dict[str, str], who: str
) -> None:
    with pytest.raises(FalconLabError, match=f"^{who} is .*known: offline, online, disabled"):
        wandb_mode(configured, variables)


@pytest.mark.parametrize("given", ["../x", "a/b", " ", "a" * 300])
def test_a_run_id_that_would_be_a_path_is_refused(given: str) -> None:
    with pytest.raises(FalconLabError, match="WANDB_RUN_ID"):
        wandb_run({"WANDB_RUN_ID": given})
