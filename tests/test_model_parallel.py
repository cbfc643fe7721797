"""What processes that share a target are told, and what cannot be shared."""

from __future__ import annotations

import pytest

from falcon_lab.config.load import load_experiment
from falcon_lab.environment import is_worker, world_size
from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.model_parallel import tensor_plan
from test_architecture import GRAPH
from tiny_models import tiny_target

SHARED = ["trainer.strategy=model_parallel", "stages=[target,data,distil]"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("stages=[distil,evaluate]", "stages"),
        ("distillation.decode_every=5", "distillation.decode_every"),
        ("distillation.compile=true", "distillation.compile"),
        ("distillation.least_squares=100", "distillation.least_squares"),
        ("data.feature_store=there", "data.feature_store"),
        ("data.regenerate=0.5", "data.regenerate"),
        ("trainer.strategy={name: ddp, static: true}", "trainer.strategy.name"),
        ("trainer.strategy={name: model_parallel, tensor_size: 2}", "tensor_parallel_size"),
        ("trainer.strategy={name: model_parallel, tensor_parallel_size: 0}", "a number"),
        ("trainer.strategy={name: model_parallel, drafter: split}", "replicated or sharded"),
        (
            "trainer.strategy={name: model_parallel, drafter: sharded, tensor_parallel_size: 2}",
            "trainer.strategy.drafter",
        ),
    ],
)
def test_what_needs_a_whole_target_is_refused_with_its_key(override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load_experiment(None, [*SHARED, override])


def test_a_finished_run_may_be_evaluated_and_a_server_may_write() -> None:
    load_experiment(None, ["trainer.strategy=model_parallel", "stages=[evaluate,report]"])
    load_experiment(
        None, [*SHARED, "data.regenerate=1", "data.server.url=http://127.0.0.1:8000/v1"]
    )


def test_layers_are_divided_by_the_plan_of_their_family() -> None:
    found = tensor_plan(tiny_target("qwen3"), 2)
    assert {name.rpartition(".")[2] for name in found} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


@pytest.mark.parametrize(("family", "parts", "named"), [("gpt2", 2, "gpt2"), ("llama", 4, "heads")])
def test_what_cannot_be_divided_is_refused(family: str, parts: int, named: str) -> None:
    with pytest.raises(FalconLabError, match=named):
        tensor_plan(tiny_target(family), parts)


def test_slurm_starts_processes_of_one_training_as_lightning_sees_it() -> None:
    tasks = {"SLURM_NTASKS": "16", "SLURM_PROCID": "3", "SLURM_JOB_NAME": "train"}
    assert is_worker(tasks)
    assert world_size(tasks) == 16
    assert not is_worker(tasks | {"SLURM_PROCID": "0"})
    assert not is_worker(tasks | {"SLURM_JOB_NAME": "bash"})
    assert world_size({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) == 1


def test_nothing_imports_it_at_the_start() -> None:
    users = {name for name, found in GRAPH.items() if "falcon_lab.model_parallel" in found}
    assert users == {"falcon_lab.trainer", "falcon_lab.distill.module"}
