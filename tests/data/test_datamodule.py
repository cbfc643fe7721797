"""The data stage and its datamodule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from fakes.completions import serving
from fakes.drafters import RandomDrafter
from falcon_lab.config.schema import DataConfig
from falcon_lab.data.datamodule import FalconDataModule, check_data
from falcon_lab.data.encoding import train_tokenizer
from falcon_lab.data.feature_index import StoreIndex, write_index
from falcon_lab.data.generated.corpus import generate_modules
from falcon_lab.data.packing import Batch
from falcon_lab.distill.rows import labelled_positions
from falcon_lab.errors import FalconLabError
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.hooks import Component
from falcon_lab.plugins.registry import Components
from tiny_models import tiny_target


@cache
def tokenizer() -> Any:
    return train_tokenizer(generate_modules("train", 20), 300)


def datamodule(**options: Any) -> FalconDataModule:
    settings = {"documents": 12, "length": 64, "batch_size": 4, "validation": 4, **options}
    return FalconDataModule(DataConfig(**settings), tokenizer())


class Watch(L.LightningModule):
    """Trains one number and writes down what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, int, int]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen.append((batch_idx, int(batch.index), int(batch.tokens.sum())))
        return self.weight * batch.tokens.double().mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val/rows", float(len(batch.tokens)), batch_size=len(batch.tokens))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Killed(Exception):
    """Stands for SIGKILL."""


class Kill(L.Callback):
    """Saves a checkpoint after a step, and dies one micro-batch later."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path, self.saved = step, path, False

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.saved:
            raise Killed
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            self.saved = True


def fit(
    steps: int,
    *,
    resume: Path | None = None,
    callbacks: Sequence[L.Callback] = (),
    workers: int = 0,
    **options: Any,
) -> tuple[Watch, L.Trainer]:
    module = Watch()
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        **options,
    )
    data = datamodule(workers=workers)
    try:
        trainer.fit(module, data, ckpt_path=None if resume is None else str(resume))
    except Killed:
        module.seen.pop()  # seen after the checkpoint, so it is lost
    return module, trainer


@pytest.mark.parametrize(("accumulate", "workers"), [(1, 0), (3, 0), (3, 2)])
@pytest.mark.filterwarnings("ignore")
def test_a_killed_training_sees_the_rest_of_the_batches_and_none_twice(
    tmp_path: Path, accumulate: int, workers: int
) -> None:
    options = {"accumulate_grad_batches": accumulate, "workers": workers}
    options |= {"val_check_interval": 4, "check_val_every_n_epoch": None}
    whole, _ = fit(14, **options)
    assert [index for _, index, _ in whole.seen] == list(range(14 * accumulate))
    path = tmp_path / "x.ckpt"
    first, _ = fit(14, callbacks=[Kill(9, path)], **options)
    second, trainer = fit(14, resume=path, **options)
    assert len(first.seen) == 9 * accumulate
    assert first.seen + second.seen == whole.seen
    assert trainer.global_step == 14
    assert torch.equal(second.weight, whole.weight)


@pytest.mark.filterwarnings("ignore")
def test_a_training_that_max_steps_ended_goes_on_when_there_are_more(tmp_path: Path) -> None:
    whole, _ = fit(9, accumulate_grad_batches=2)
    first, trainer = fit(4, accumulate_grad_batches=2)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    second, _ = fit(9, accumulate_grad_batches=2, resume=tmp_path / "x.ckpt")
    assert [seen[1:] for seen in first.seen + second.seen] == [seen[1:] for seen in whole.seen]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", [3, 0])
def test_epochs_may_govern_in_place_of_steps(tmp_path: Path, step: int) -> None:
    whole, trainer = fit(-1, max_epochs=2)
    epoch = -(-len(datamodule().train_sequences) // 4)
    assert [index for _, index, _ in whole.seen] == list(range(2 * epoch))
    assert trainer.current_epoch == 2
    path = tmp_path / "x.ckpt"
    kill = Kill(step or epoch, path)  # in the middle of an epoch, and at its end
    first, _ = fit(-1, max_epochs=2, callbacks=[kill])
    second, _ = fit(-1, max_epochs=2, resume=path)
    assert [seen[1:] for seen in first.seen + second.seen] == [seen[1:] for seen in whole.seen]


def test_rows_hold_the_documents_of_their_split() -> None:
    data = datamodule()
    text = tokenizer().decode(data.train_sequences.tokens.flatten().tolist())
    for module in generate_modules("train", 12):
        assert module[:60] in text
    assert len(data.validation_sequences) == 4
    assert data.train_sequences.length == 64
    shown = tokenizer().decode(data.validation_sequences.tokens[0].tolist())
    assert shown[:40] in "".join(generate_modules("validation", 64))


def test_the_same_configuration_gives_the_same_batches_and_another_seed_others() -> None:
    first, again, other = (datamodule(seed=seed).batches() for seed in (0, 0, 1))
    assert torch.equal(first[5].tokens, again[5].tokens)
    assert not torch.equal(first[5].tokens, other[5].tokens)


def test_validation_can_be_left_out() -> None:
    data = datamodule(validation=0)
    data.setup()
    assert data.val_dataloader() == []


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"batch_size": 0}, r"data\.batch_size is 0; it must be at least 1"),
        ({"length": 1}, r"data\.length is 1; it must be at least 2"),
        ({"workers": -1}, r"data\.workers is -1"),
        ({"documents": 0}, r"data\.documents is 0"),
    ],
)
def test_settings_that_make_no_sense_are_named(options: dict[str, int], fault: str) -> None:
    with pytest.raises(FalconLabError, match=fault):
        datamodule(**options)


def test_sequences_longer_than_the_target_reads_are_refused_before_anything_is_read() -> None:
    with pytest.raises(FalconLabError, match=r"data\.length is 64 .* reads 32 .* data\.length=32"):
        FalconDataModule(DataConfig(length=64, corpus="gone"), tokenizer(), max_positions=32)


def test_a_tokenizer_of_another_vocabulary_is_refused() -> None:
    data = FalconDataModule(DataConfig(documents=3, length=64), tokenizer(), vocab_size=100)
    with pytest.raises(FalconLabError, match=r"vocabulary has 100 entries; .* belong together"):
        data.setup()


def test_stored_features_come_with_their_rows(tmp_path: Path) -> None:
    target = tiny_target("llama", vocab=300)
    config = DataConfig(
        documents=3, length=32, batch_size=2, validation=2, feature_store=str(tmp_path / "store")
    )
    data = FalconDataModule(
        config, tokenizer(), max_positions=target.max_positions, vocab_size=target.vocab_size
    )
    said: list[str] = []
    data.build_features(target, said.append)
    assert ["store/train" in said[0], "store/validation" in said[1]] == [True, True]
    held = next(iter(data.val_dataloader()))
    for batch in (data.batches()[0], data.batches()[7], held):
        expected = target.teacher(batch.tokens, batch.documents, batch.positions)
        assert batch.features is not None
        torch.testing.assert_close(batch.features, expected, rtol=1e-5, atol=1e-6)


def test_stored_features_are_those_of_the_same_pass_bit_for_bit(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        target = tiny_target("llama", vocab=300)
        target.model.to(dtype)
        config = DataConfig(
            documents=3,
            length=32,
            batch_size=2,
            validation=2,
            feature_store=str(tmp_path / f"{dtype}"),
        )
        data = FalconDataModule(config, tokenizer(), vocab_size=target.vocab_size)
        data.build_features(target)
        held = next(iter(data.val_dataloader()))
        assert held.features is not None
        assert held.features.dtype == dtype
        read = target.teacher(held.tokens, held.documents, held.positions)
        assert torch.equal(held.features, read)
        assert held.argmax is not None
        labelled = labelled_positions(held)
        assert torch.equal(held.argmax[labelled], target.head(read).argmax(-1)[labelled])


def test_without_a_store_nothing_is_written_or_announced() -> None:
    data = datamodule()
    said: list[str] = []
    data.build_features(tiny_target("llama"), said.append)
    assert said == []
    assert data.batches()[0].features is None


def test_validation_takes_the_beginnings_of_many_documents(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"{number} " * 400, "utf-8")
    tokenizer = train_tokenizer(["0 1 2 3 4 5 6 7 8 9 "], 270)
    config = DataConfig(corpus=str(tmp_path), length=16, batch_size=1, validation=6)
    rows = FalconDataModule(config, tokenizer).validation_sequences
    assert len(rows) == 6
    beginnings = {
        tuple(row[:4].tolist())
        for row, at in zip(rows.tokens, rows.positions, strict=True)
        if at[0] == 0
    }
    assert len(beginnings) >= 3, "a validation of one file says nothing of the others"


# --- stage -----------------------------------------------------------------------------


def tapping(layer: int) -> Components:
    """The component ``mine``, a drafter that reads the states of a layer."""

    def build(config: Any, context: Any) -> RandomDrafter:
        drafter = RandomDrafter(64, 1)
        drafter.taps = (layer,)
        return drafter

    return Components([Component("drafter", "mine", build, None, "mine", "1")])


@pytest.mark.parametrize(
    ("layer", "said"),
    [(1, r"has the states of no layer, and layer 1 .*feature_store=null"), (9, "taps layer 9")],
)
def test_a_store_without_the_layers_of_the_drafter_is_refused_before_the_corpus_is_read(
    tmp_path: Path, layer: int, said: str
) -> None:
    folder, target = tmp_path / "store" / "train", tiny_target()
    folder.mkdir(parents=True)
    write_index(folder, StoreIndex(target.fingerprint, "data", 1, 32, 32, "float32", 1))
    with pytest.raises(FalconLabError, match=said):
        check_data(
            DataConfig(corpus="gone", feature_store=str(tmp_path / "store")),
            target,
            drafter={"name": "mine"},
            components=tapping(layer),
        )


def test_tokens_are_counted_where_the_loss_has_them() -> None:
    data = datamodule()
    sequences, counted = data.train_sequences, data.token_counts()
    masks = zip(sequences.tokens.tolist(), sequences.loss_mask.tolist(), strict=True)
    expected = Counter(token for row in masks for token, has in zip(*row, strict=True) if has)
    assert {token: n for token, n in enumerate(counted.tolist()) if n} == expected
    assert int(counted.sum()) < sequences.tokens.numel()  # padding is no token of an answer


@pytest.mark.parametrize(
    ("stands_in", "said"), [(False, r"computed for target another"), (True, "no corpus 'gone'")]
)
def test_another_target_s_store_is_refused_before_the_corpus_is_read(
    tmp_path: Path, stands_in: bool, said: str
) -> None:
    folder = tmp_path / "store" / "train"
    folder.mkdir(parents=True)
    write_index(folder, StoreIndex("another", "data", 1, 32, 32, "float32", 1))
    with pytest.raises(FalconLabError, match=said):
        check_data(
            DataConfig(corpus="gone", feature_store=str(tmp_path / "store")),
            tiny_target(),
            drafter={"name": "falcon"},
            components=load_components(),
            stands_in=stands_in,
        )


def test_a_server_regenerates_what_the_target_does_and_is_not_needed_again() -> None:
    target = tiny_target("llama", vocab=300)
    settings: dict[str, Any] = {"documents": 6, "length": 32, "validation": 1, "regenerate": 0.7}
    here = FalconDataModule.for_target(DataConfig(**settings), target)
    with serving(target) as served:
        config = DataConfig(**settings, server=served.config(retries=0))
        there = FalconDataModule.for_target(config, target)
        there.check_server()
        assert torch.equal(there.train_sequences.tokens, here.train_sequences.tokens)
        assert torch.equal(there.train_sequences.loss_mask, here.train_sequences.loss_mask)
    again = FalconDataModule.for_target(config, target)
    again.check_server()
    assert torch.equal(again.train_sequences.tokens, here.train_sequences.tokens)
    more = FalconDataModule.for_target(replace(config, documents=7), target)
    with pytest.raises(FalconLabError, match="cannot be reached"):
        more.check_server()
