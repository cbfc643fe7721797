import copy
import json
import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_lab.data import feature_store
from falcon_lab.data.encoding import Encoded
from falcon_lab.data.feature_store import FeatureStore, build_store, check_store, size
from falcon_lab.data.packing import PackedSequences, pack
from falcon_lab.errors import FalconLabError

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

    def head(self, features: Tensor) -> Tensor:
        """Logits whose greatest is the token's."""
        return -(torch.arange(20) - features[:, :1].float()).abs()


def plan_store(folder: Path, sequences: PackedSequences, target: Echo) -> feature_store.StorePlan:
    """The plan of a store with shards of three sequences in float32."""
    return feature_store.plan_store(folder, sequences, target, shard_bytes=3 * 4 * (3 * 4 + 4))


def build(folder: Path, target: Echo, sequences: PackedSequences = ROWS) -> FeatureStore:
    return build_store(plan_store(folder, sequences, target), sequences, target, batch_size=2)


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

    def full(tensors: dict[str, Tensor], path: Path) -> None:
        if "00001" in path.name:
            path.write_bytes(b"part")
            raise OSError(28, "No space left on device")
        save(tensors, path)

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
