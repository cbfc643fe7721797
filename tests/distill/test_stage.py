"""The training as a whole: the look at decoding, and two processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader

from distilling import QUIET, Data, Notes, batch, distillation, weights
from fakes.drafters import TrainedAlone
from falcon_lab.acceptance import Greedy
from falcon_lab.config.load import load_experiment
from falcon_lab.controllers import Fixed
from falcon_lab.data.datamodule import FalconDataModule
from falcon_lab.data.packing import Batch
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.distill.module import Distillation
from falcon_lab.distill.stage import DecodingCheck, begin_at_solution, build_drafter
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.drafters.saved import save_drafter
from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.glancing import NoGlancing
from falcon_lab.interfaces import BuildContext, DrafterInputs, FirstWeights
from falcon_lab.model.target import Target
from falcon_lab.plugins.builtins import ChainConfig, FalconConfig, FixedConfig
from falcon_lab.plugins.discovery import load_components
from falcon_lab.training import train
from falcon_lab.trees.template_tree import Chain
from running import overrides
from tiny_models import tiny_target


def _check(module: Distillation, every: int) -> DecodingCheck:
    context = BuildContext(module.target, block=module.drafter.block)
    engine = SpeculativeEngine(
        module.target,
        module.drafter,
        Chain(ChainConfig(depth=4), context),
        Greedy(None, context),
        Fixed(FixedConfig(), context),
    )
    stop = StopCondition(frozenset(), [], module.target.tokenizer)
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([8])]
    return DecodingCheck(engine, prompts, every=every, max_new_tokens=12, stop=stop)


def test_real_decoding_is_looked_at_every_so_many_steps(tmp_path: Path) -> None:
    module, notes = distillation(), Notes()
    data = Data(list(range(20)))
    train(module, data, QUIET, tmp_path, notes, 3, [_check(module, every=2)])
    looked = notes.series("decode/mean_accepted")
    assert len(looked) == 3
    assert all(1 <= mean <= 5 for mean in looked)
    assert module.drafter.training


def test_looking_changes_nothing(tmp_path: Path) -> None:
    plain, watched = distillation(), distillation()
    train(plain, Data(list(range(20))), QUIET, tmp_path / "plain", None, 3)
    looks = [_check(watched, every=1)]
    train(watched, Data(list(range(20))), QUIET, tmp_path / "watched", None, 3, looks)
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, weights(watched)[name])


def test_accumulated_micro_batches_are_looked_at_once(tmp_path: Path) -> None:
    module, notes = distillation(), Notes()
    trainer = {**QUIET, "accumulate_grad_batches": 3}
    train(module, Data(list(range(20))), trainer, tmp_path, notes, 0, [_check(module, every=3)])
    assert len(notes.series("decode/mean_accepted")) == 2


# --- first weights ----------------------------------------------------------------------------


class Solved(FirstWeights):
    """Keeps the shapes of what it is given, and finds a row in every sequence."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def add(self, inputs: DrafterInputs, features: torch.Tensor) -> None:
        assert inputs.taps is not None
        assert torch.equal(inputs.features, features[:, :-1])  # no noise
        self.seen.append([*inputs.tokens.shape, features.shape[1], inputs.taps.shape[2]])

    def assign(self) -> int:
        return len(self.seen)


class BeginsSomewhere(FalconDrafter):
    taps = (1,)

    def first_weights(self) -> FirstWeights:
        self.solution = Solved()
        return self.solution


class Numbered(Data):
    """Batches by number, as a stage asks for them before there is a trainer."""

    def batches(self) -> list[Batch]:
        return [batch(index) for index in self.train.indices]


@pytest.mark.parametrize(("tokens", "batches"), [(1, 1), (49, 2), (10_000, 3)])
def test_first_weights_rest_on_so_many_tokens_or_all(tokens: int, batches: int) -> None:
    target = tiny_target()
    drafter = BeginsSomewhere(FalconConfig(), BuildContext(target))
    module, data = distillation(drafter=drafter, target=target), Numbered([4, 5, 6])
    begin_at_solution(module, cast(FalconDataModule, data), tokens)
    assert drafter.solution.seen == batches * [[2, 23, 24, 1]]
    with pytest.raises(FalconLabError, match="no document that is longer"):
        begin_at_solution(module, cast(FalconDataModule, Numbered([])), tokens)


def test_a_drafter_without_a_solution_is_refused_before_there_are_data() -> None:
    with pytest.raises(FalconLabError, match=r"drafter\.fuse=linear"):
        distillation(least_squares=1)
    target = tiny_target()
    with pytest.raises(FalconLabError, match=r"TrainedAlone has no .*least_squares=0") as raised:
        distillation(drafter=TrainedAlone(), target=target, least_squares=1)
    assert "\n" not in str(raised.value)


# --- a drafter to start with ------------------------------------------------------------------

START = {"name": "falcon", "block": 2, "layers": 1, "draft_vocabulary": 20}


def _to_start_with(folder: Path, target: Target, *, counts: torch.Tensor | None = None) -> Any:
    experiment = load_experiment(None, [*overrides(START, "drafter"), "seed=7"])
    tokens = torch.arange(target.vocab_size) if counts is None else counts
    made = build_drafter(experiment, target, load_components(), lambda: tokens)
    origin = load_components().provenance("drafter", experiment.drafter)
    save_drafter(
        folder, made, node=experiment.drafter, provenance=origin, target=target, card="# it\n"
    )
    return made


def _started(folder: Path | str, target: Target, *more: str, **options: Any) -> Any:
    words = [*overrides(START, "drafter"), f"distillation.start={folder}", *more]
    counts = torch.zeros(target.vocab_size)  # of other data
    components = load_components()
    return build_drafter(
        load_experiment(None, words), target, components, lambda: counts, **options
    )


def test_a_training_begins_with_the_weights_and_the_draft_vocabulary_of_a_saved_drafter(
    tmp_path: Path,
) -> None:
    target = tiny_target()
    made = _to_start_with(tmp_path / "first", target)
    fresh = _started("null", target)
    target.model.bfloat16()  # the student's weights are float32 beside any teacher
    started = _started(tmp_path / "first", target)
    found, other = started.state_dict(), fresh.state_dict()
    for name, before in made.state_dict().items():
        assert torch.equal(found[name], before)
        assert found[name].dtype == before.dtype
    assert any(not torch.equal(other[name], begun) for name, begun in found.items())
    assert started.draft_vocabulary.ids.tolist() != fresh.draft_vocabulary.ids.tolist()
    assert started.training


def test_a_drafter_to_start_with_must_be_the_one_that_is_described_and_for_the_target(
    tmp_path: Path,
) -> None:
    target, other = tiny_target(), tiny_target(seed=5)
    _to_start_with(tmp_path / "first", target)
    with pytest.raises(FalconLabError, match=r"start: .*block .* is 2, and drafter\.block is 3"):
        _started(tmp_path / "first", target, "drafter.block=3")
    with pytest.raises(FalconLabError, match=r"start: .*trained for tiny-llama with fingerprint"):
        _started(tmp_path / "first", other)
    assert _started(tmp_path / "first", other, stands_in=True) is not None
    with pytest.raises(FalconLabError, match=r"start: .*whose hidden_size is 32; .* has 48"):
        _started(tmp_path / "first", tiny_target(hidden=48), stands_in=True)
    with pytest.raises(FalconLabError, match=r"distillation\.start: .*nowhere"):
        _started(tmp_path / "nowhere", target)
    with pytest.raises(ConfigError, match=r"least_squares: is 100, and distillation\.start"):
        _started(tmp_path / "first", target, "distillation.least_squares=100")


# --- two processes --------------------------------------------------------------------------------


class Shared(Data):
    """Every process takes one half of each batch; the halves differ in what counts."""

    def __init__(self) -> None:
        super().__init__([])

    def _part(self, index: int) -> Batch:
        whole = batch(index, size=4)
        mask = whole.loss_mask.clone()
        mask[:2, 10:] = False
        whole = whole._replace(loss_mask=mask)
        rank, world = self.trainer.global_rank, self.trainer.world_size
        size = 4 // world
        part = slice(rank * size, (rank + 1) * size)
        return Batch(*(field[part] for field in whole[:4]), whole.index)

    def train_dataloader(self) -> Any:
        return DataLoader([self._part(index) for index in range(4)], batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader([self._part(index) for index in (90, 91)], batch_size=None)  # type: ignore[arg-type]


def _run_shared(folder: Path, devices: int) -> None:
    """Without any randomness, so that the halves are trained on as the whole is."""
    module = distillation(
        noise=0.0,
        dropout=0.0,
        phase="absolute",
        glancing=NoGlancing(None, BuildContext(None)),  # type: ignore[arg-type]
    )
    trainer = {**QUIET, "max_steps": 4, "devices": devices, "val_check_interval": 4}
    if devices > 1:
        trainer |= {"strategy": "ddp", "use_distributed_sampler": False}
    notes = Notes()
    made = train(module, Shared(), trainer, folder, notes, 2)
    if made.is_global_zero:
        torch.save({"lines": notes.lines, "weights": weights(module)}, folder / "result.pt")


@pytest.mark.slow
def test_two_processes_log_and_learn_what_one_does_with_the_double_batch(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    _run_shared(tmp_path / "one", devices=1)
    root = Path(__file__).parents[2]
    paths = [str(root / "src"), str(root / "tests"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "two")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [torch.load(tmp_path / n / "result.pt", weights_only=True) for n in ("one", "two")]
    one, two = results
    watched = ["train/loss", "train/loss/soft", "train/position_2/accuracy", "train/grad_norm"]
    watched += ["val/loss", "val/accept_rate", "val/expected_accept_length"]
    for key in watched:
        alone, together = (
            torch.tensor([line[key] for _, line in result["lines"] if key in line])
            for result in results
        )
        assert len(alone) > 0
        assert alone.isfinite().all()
        assert torch.allclose(alone, together, rtol=1e-3, atol=1e-4), key
    for name, tensor in one["weights"].items():
        assert torch.allclose(tensor, two["weights"][name], atol=1e-3), name
    assert (tmp_path / "two" / "checkpoints" / "last.ckpt").exists()


if __name__ == "__main__":
    _run_shared(Path(sys.argv[1]), devices=2)


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        ("{name: union, parts: [{name: falcon}, {name: falcon}]}", "has nothing to train"),
        ("{name: saved}", r"train it further: distillation\.start"),
        ("{name: saved, path: runs/csgd/drafter}", r"train it further: distillation\.start"),
    ],
)
def test_what_is_not_to_be_trained_is_refused(drafter: str, said: str) -> None:
    experiment = load_experiment(None, [f"drafter={drafter}"])
    with pytest.raises(FalconLabError, match=said):
        build_drafter(experiment, tiny_target(), load_components())
