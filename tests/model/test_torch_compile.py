"""The drafter's training through ``torch.compile``, and without it where it fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distilling import QUIET, Data, Notes, distillation, weights
from fakes.drafters import TrainedAlone
from falcon_lab.distill.module import Distillation
from falcon_lab.errors import FalconLabError
from falcon_lab.model.torch_compile import Call, Compiled
from falcon_lab.training import train


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


def _compiled(compiler: Any, **options: Any) -> Distillation:
    module = distillation(**options)
    module.config.compile = True
    compile_training = module.drafter.compile_training
    module.drafter.compile_training = lambda: compile_training(compiler)
    return module


def _losses(module: Distillation, folder: Path, **trainer: Any) -> list[float]:
    notes = Notes()
    trainer = {**QUIET, "max_steps": 3, **trainer}
    train(module, Data([3, 4, 5], [9]), trainer, folder, notes, 0)
    return notes.series("train/loss")


@pytest.mark.parametrize("options", [{"block": 2}, {"block": 3, "query": "newest"}])
def test_a_compiled_training_is_the_plain_one(tmp_path: Path, options: dict[str, Any]) -> None:
    """Through Dynamo and AOT autograd, whose graphs Inductor would take over."""
    graphs = []

    def compiler(call: Call) -> Call:
        graphs.append(call)
        compiled: Call = torch.compile(call, backend="aot_eager")
        return compiled

    plain, fast = distillation(**options), _compiled(compiler, **options)
    names = list(fast.drafter.state_dict())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be compiled.*")
        losses = _losses(fast, tmp_path / "fast")
    assert losses == pytest.approx(_losses(plain, tmp_path / "plain"), rel=1e-5)
    assert len(graphs) == 1
    assert list(fast.drafter.state_dict()) == names
    for name, tensor in weights(plain).items():
        assert torch.allclose(tensor, weights(fast)[name], atol=1e-5), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_inductor_s_kernels_give_the_same(tmp_path: Path) -> None:
    """On a CPU too, but there its C++ compiler takes a minute."""
    plain, fast = distillation(), _compiled(torch.compile)
    losses = _losses(fast, tmp_path / "fast", accelerator="gpu")
    assert losses == pytest.approx(_losses(plain, tmp_path / "p", accelerator="gpu"), rel=1e-3)


def test_training_goes_on_where_compiling_fails_and_says_so_once(tmp_path: Path) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler\nand a long tale")

    module = _compiled(partial(torch.compile, backend=broken))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = _losses(module, tmp_path / "broken")
    told = [str(w.message) for w in caught if "cannot be compiled" in str(w.message)]
    assert len(told) == 1
    assert "the drafter's decoder blocks" in told[0]
    assert "\n" not in told[0]
    assert losses == _losses(distillation(), tmp_path / "plain")


def test_wrong_arguments_are_no_failure_of_the_compiler() -> None:
    def refuse(rows: Tensor) -> Tensor:
        raise ValueError("these rows")

    call = Compiled(refuse, "it", lambda call: call)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(ValueError, match="these rows"):
                call(rows=torch.ones(1))
        assert caught == []


def test_a_drafter_without_anything_to_compile_is_named(tmp_path: Path) -> None:
    class Plain(torch.nn.Module, TrainedAlone):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

    module = distillation(drafter=Plain())
    module.config.compile = True
    with pytest.raises(FalconLabError, match=r"Plain .*set distillation\.compile=false"):
        _losses(module, tmp_path)
