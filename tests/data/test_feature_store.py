import copy
import json
import pickle
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from falcon_lab.data import feature_store
from falcon_lab.data.encoding import Encoded
from falcon_lab.data.feature_index import read_index, write_index
from falcon_lab.data.feature_store import FeatureStore, build_store, check_store, size
from falcon_lab.data.packing import PackedSequences, pack
from falcon_lab.errors import FalconLabError
from falcon_lab.files import claimed

ROWS = pack([Encoded([n + 1] * 4, [True] * 4) for n in range(7)], 4)


class Echo:
    """A teacher whose features tell the token, the position and the document."""

    fingerprint = "target-a"
    hidden_size = 3
    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.rows_asked = 0

    def teacher(self, tokens: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        self.rows_asked += len(tokens)
        return torch.stack([tokens, positions, documents], dim=-1).to(self.dtype)

    def tapped(self, layers: Sequence[int]) -> Self:
        """Shares the count of what was asked."""
        self.layers = layers
        return self

    def tapped_teacher(self, *rows: Tensor) -> tuple[Tensor, Tensor]:
        """States that tell the layer too."""
        features = self.teacher(*rows)
        return features, torch.stack([features + 100 * layer for layer in self.layers], dim=2)

    def head(self, features: Tensor) -> Tensor:
        """Logits whose greatest is the token's."""
        return -(torch.arange(20) - features[:, :1].float()).abs()


def plan_store(
    folder: Path,
    sequences: PackedSequences,
    target: Echo,
    taps: Sequence[int] = (),
    kept: str = "auto",
) -> feature_store.StorePlan:
    """The plan of a store with shards of three sequences in float32 without taps."""
    size = 3 * 4 * (3 * 4 + 4)
    return feature_store.plan_store(
        folder, sequences, target, taps=taps, kept=kept, shard_bytes=size
    )


def build(
    folder: Path,
    target: Echo,
    sequences: PackedSequences = ROWS,
    taps: Sequence[int] = (),
    kept: str = "auto",
) -> FeatureStore:
    plan = plan_store(folder, sequences, target, taps, kept)
    return build_store(plan, sequences, target, taps=taps, batch_size=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_read_back_row_by_row(tmp_path: Path, dtype: torch.dtype) -> None:
    target = Echo(dtype)
    store = build(tmp_path / "s", target)
    wanted = [6, 0, 3, 3]
    features = store[wanted]
    assert (features.shape, features.dtype) == ((4, 4, 3), dtype)
    assert features[:, :, 0].tolist() == [[row + 1.0] * 4 for row in wanted]
    assert features[0, :, 1].tolist() == [0, 1, 2, 3]
    assert target.rows_asked == 7
    assert store.argmax(wanted).tolist() == [[row + 1] * 3 + [0] for row in wanted]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_layers_are_read_back_in_the_order_asked_for(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    store = build(tmp_path, Echo(dtype), taps=(4, 1))
    features, taps = store[[6, 0]], store.taps([6, 0])
    assert taps is not None
    assert (taps.shape, taps.dtype) == ((2, 4, 2, 3), dtype)
    for place, layer in enumerate((4, 1)):
        assert torch.equal(taps[:, :, place], features + 100 * layer)
    assert build(tmp_path, Echo(dtype)).taps([6, 0]) is None  # of no use to one without


def test_a_store_with_more_layers_serves_and_one_with_others_is_refused(tmp_path: Path) -> None:
    build(tmp_path, Echo(), taps=(1, 4))
    target = Echo()
    store = build(tmp_path, target, taps=(4,))
    assert target.rows_asked == 0
    assert store.taps([2])[0, 0].tolist() == [[403.0, 400.0, 400.0]]  # type: ignore[index]
    said = r"has the states of layers 1, 4, and layer 3 .*data\.feature_store"
    with pytest.raises(FalconLabError, match=said):
        plan_store(tmp_path, ROWS, Echo(), (3, 4))
    with pytest.raises(FalconLabError, match=said):
        check_store(tmp_path, Echo(), taps=(3, 4))


def test_a_killed_build_goes_on_with_the_layers_that_it_began_with(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole", Echo(), taps=(1, 4))
    build(tmp_path / "s", Echo(), taps=(1, 4))
    (tmp_path / "s" / "features-00001.safetensors").unlink()
    build(tmp_path / "s", Echo(), taps=(4,))
    again = build(tmp_path / "s", Echo(), taps=(1, 4))
    rows = list(range(7))
    assert torch.equal(whole.taps(rows), again.taps(rows))  # type: ignore[arg-type]


class Wide(Echo):
    """A teacher whose states have an outlier far beyond what eight or sixteen bits hold."""

    hidden_size = 64

    def teacher(self, tokens: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int(tokens[0, 0]))
        features = torch.randn(*tokens.shape, 64, generator=generator)
        features[:, 1] *= 1e6
        features[:, 2] = 0
        return features.to(self.dtype)


@pytest.mark.parametrize(("kept", "near"), [("float16", 2**-11), ("float8_e4m3", 2**-4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fewer_bits_are_within_their_rounding_and_the_card_says_how_far(
    tmp_path: Path, kept: str, near: float, dtype: torch.dtype
) -> None:
    exact = build(tmp_path / "exact", Wide(dtype), taps=(2,))
    store = build(tmp_path / "small", Wide(dtype), taps=(2,), kept=kept)
    rows = list(range(7))
    assert store[rows].dtype == dtype
    assert torch.equal(store.argmax(rows), exact.argmax(rows))
    rounding = near + torch.finfo(dtype).eps
    for found, wanted in ((store[rows], exact[rows]), (store.taps(rows), exact.taps(rows))):
        assert found is not None
        assert wanted is not None
        largest = wanted.abs().amax(-1, keepdim=True).double()
        off = (found.double() - wanted.double()).abs()
        assert bool((off <= rounding * wanted.double().abs() + near * 2**-10 * largest).all())
    said = json.loads((tmp_path / "small" / "store.json").read_text())["errors"]
    assert list(said) == ["features", "taps.2"]
    values, wanted = store[rows].double(), exact[rows].double()
    shares = (values - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)
    if dtype == torch.float32:  # else rounding to the target's precision is in it too
        assert said["features"] == pytest.approx(float(shares.square().mean().sqrt()), rel=1e-6)
    assert 0 < said["features"] < near
    assert read_index(tmp_path / "small").error_sentence.startswith(f"kept in {kept}")


def test_fewer_bits_take_the_room_that_was_said(tmp_path: Path) -> None:
    plan = plan_store(tmp_path, ROWS, Wide(), (2,), "float8_e4m3")
    assert plan.bytes == 7 * 4 * (2 * (64 + 4) + 4)
    build(tmp_path, Wide(), taps=(2,), kept="float8_e4m3")
    written = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert plan.bytes <= written < plan.bytes + plan.index.shards * 700


def test_a_store_of_another_precision_is_refused_and_the_target_s_own_is_exact(
    tmp_path: Path,
) -> None:
    build(tmp_path, Echo(), kept="float8_e4m3")
    for kept in ("auto", "float16"):
        said = rf"feature_store_dtype float8_e4m3, this run has feature_store_dtype {kept}"
        with pytest.raises(FalconLabError, match=said):
            check_store(tmp_path, Echo(), kept=kept)
        with pytest.raises(FalconLabError, match=said):
            plan_store(tmp_path, ROWS, Echo(), kept=kept)
    half = build(tmp_path / "half", Echo(torch.float16), kept="float16")
    assert half.index.is_exact
    assert not half.index.errors


def test_a_shard_of_an_earlier_version_is_written_anew(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    store = build(tmp_path, Echo())
    shard = tmp_path / "features-00001.safetensors"
    save_file({"features": load_file(shard)["features"]}, shard)
    target = Echo()
    assert build(tmp_path, target).argmax([4]).equal(store.argmax([4]))
    assert target.rows_asked == 3


def test_the_size_is_known_and_told_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    plan = plan_store(folder, ROWS, Echo())
    assert not folder.exists()
    assert plan.bytes == plan.missing_bytes == 7 * 4 * (3 * 4 + 4)
    assert "448 B (7 sequences x 4 tokens x 3 features in float32), 448 B to write" in plan.sentence
    build(folder, Echo())
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert plan.bytes <= written < plan.bytes + 3 * 200
    assert "complete" in plan_store(folder, ROWS, Echo()).sentence


def test_a_killed_build_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    class Dies(Echo):
        def teacher(self, *rows: Tensor) -> Tensor:
            if self.rows_asked >= 3:
                raise KeyboardInterrupt
            return super().teacher(*rows)

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, Dies())
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    with pytest.raises(FalconLabError, match="missing or damaged"):
        FeatureStore.open(tmp_path, "target-a", ROWS.fingerprint())
    target = Echo()
    store = build(tmp_path, target)
    assert target.rows_asked == 4
    assert store[list(range(7))][:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_several_builders_share_a_store_and_write_no_shard_twice(tmp_path: Path) -> None:
    alone = build(tmp_path / "alone", Echo())
    folder, names = (
        tmp_path / "shared",
        {f"features-0000{number}.safetensors" for number in range(3)},
    )
    both = Echo(), Echo()
    plans = [plan_store(folder, ROWS, target) for target in both]  # before anything is there
    write_index(folder, plans[0].index)
    first = Thread(target=lambda: build_store(plans[0], ROWS, both[0], batch_size=1))
    first.start()
    store = build_store(plans[1], ROWS, both[1], batch_size=1)
    first.join()
    assert both[0].rows_asked + both[1].rows_asked == 7
    rows = list(range(7))
    assert torch.equal(store[rows], alone[rows])
    assert {file.name for file in folder.iterdir()} == {*names, "store.json"}


def test_what_another_builder_leaves_undone_is_done(tmp_path: Path) -> None:
    plan = plan_store(tmp_path, ROWS, Echo())
    target = Echo()
    with claimed(tmp_path / "features-00001.lock", wait=False) as mine:
        assert mine
        late = Thread(target=lambda: build_store(plan, ROWS, target))
        late.start()
        while target.rows_asked < 4:  # all but the shard that is taken
            sleep(0.01)
    late.join()
    assert target.rows_asked == 7
    assert FeatureStore.open(tmp_path, "target-a", ROWS.fingerprint())[[4]][0, 0, 0] == 5


def test_a_truncated_shard_is_seen_and_written_anew(tmp_path: Path) -> None:
    build(tmp_path, Echo())
    shard = tmp_path / "features-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(FalconLabError, match=r"features-00001\.safetensors: missing or damaged"):
        FeatureStore.open(tmp_path, "target-a", ROWS.fingerprint())
    target = Echo()
    assert build(tmp_path, target)[[3]][0, 0, 0] == 4
    assert target.rows_asked == 3


def test_another_target_or_other_data_are_refused_with_both_names(tmp_path: Path) -> None:
    build(tmp_path, Echo())
    other = Echo()
    other.fingerprint = "target-b"
    with pytest.raises(FalconLabError, match="for target target-a, this run has target target-b"):
        plan_store(tmp_path, ROWS, other)
    shorter = ROWS.take(6)
    names = f"for data {ROWS.fingerprint()}, this run has data {shorter.fingerprint()}"
    with pytest.raises(FalconLabError, match=names):
        plan_store(tmp_path, shorter, Echo())
    assert build(tmp_path, Echo())[[0]][0, 0, 0] == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fingerprint": "target-b"}, "for target target-a, this run has target target-b"),
        ({"dtype": torch.bfloat16}, r"for dtype float32, this run .*; set target\.dtype=float32"),
    ],
)
def test_another_target_or_precision_is_refused_before_anything_is_packed(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    build(tmp_path, Echo())
    check_store(tmp_path, Echo())
    check_store(tmp_path / "elsewhere", Echo())
    other = Echo()
    for name, value in change.items():
        setattr(other, name, value)
    with pytest.raises(FalconLabError, match=said):
        check_store(tmp_path, other)


def test_a_disk_without_room_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = namedtuple("disk", "free")(300)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: disk)
    with pytest.raises(FalconLabError, match=r"448 B to write, 300 B free .* not enough room"):
        plan_store(tmp_path / "s", ROWS, Echo())
    assert not (tmp_path / "s").exists()


def test_a_disk_that_fills_up_meanwhile_leaves_the_shards_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    save = safetensors.torch.save_file

    def full(tensors: dict[str, Tensor], path: Path, *rest: Any) -> None:
        if "00001" in path.name:
            path.write_bytes(b"part")
            raise OSError(28, "No space left on device")
        save(tensors, path, *rest)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(FalconLabError, match=r"No space left on device.*make room and run"):
        build(tmp_path, Echo())
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "features-00000.safetensors",
        "store.json",
    ]
    monkeypatch.undo()
    assert build(tmp_path, Echo())[[6]][0, 0, 0] == 7


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rows": 3}'])
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "store.json").write_text(content)
    with pytest.raises(FalconLabError, match=r"store\.json: no index of a feature store"):
        plan_store(tmp_path, ROWS, Echo())


def test_files_that_are_no_stores_are_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "features-00001.safetensors"
    mine.write_text("mine")
    with pytest.raises(FalconLabError, match=r"features-00001\.safetensors: would be replaced"):
        plan_store(tmp_path, ROWS, Echo())
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("change", [{"shard_rows": 0}, {"rows": 10**9}, {"hidden": -1}])
def test_an_index_that_describes_other_features_is_named(
    tmp_path: Path, change: dict[str, int]
) -> None:
    build(tmp_path, Echo())
    path = tmp_path / "store.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FalconLabError, match=r"store\.json: does not describe"):
        plan_store(tmp_path, ROWS, Echo())


def test_a_store_that_was_read_travels_to_worker_processes(tmp_path: Path) -> None:
    store: Any = build(tmp_path, Echo())
    before = store[[2]]
    for twin in (pickle.loads(pickle.dumps(store)), copy.copy(store)):
        assert torch.equal(twin[[2]], before)


def test_sizes_are_told_in_fitting_units() -> None:
    assert [size(n) for n in (5, 2048, 3 * 2**30, 2**42)] == [
        "5 B",
        "2.0 KiB",
        "3.0 GiB",
        "4.0 TiB",
    ]
