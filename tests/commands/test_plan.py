"""``falcon-lab plan``: its bytes are those of real files, and its hours follow their arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from falcon_lab.config.load import dump, load_experiment
from falcon_lab.config.schema import TargetConfig
from falcon_lab.data.encoding import Encoded
from falcon_lab.data.feature_store import build_store, plan_store
from falcon_lab.data.packing import pack
from falcon_lab.model.loading import load_target
from falcon_lab.plugins.discovery import load_components
from falcon_lab.studies.scale.measured import tensor_bytes
from installing import install_in_place
from running import ROOT, refused, run
from saved_models import save_untrained
from test_architecture import GRAPH
from tiny_models import save_tiny

GIVEN = ("--flops=1e12", "--bandwidth=1GB", "--memory=1GB", "--utilisation=1", "--reach=1")
LLAMA_70B = LlamaConfig(
    vocab_size=128256,
    hidden_size=8192,
    num_hidden_layers=80,
    intermediate_size=28672,
    num_attention_heads=64,
    num_key_value_heads=8,
    tie_word_embeddings=False,
    dtype="bfloat16",
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a target of four layers."""
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "target", layers=4)
    return tmp_path


def planned(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("plan", "--json", *words))
    return found


def value(found: dict[str, Any], part: str, what: str) -> float:
    return float(found["figures"][part][what]["value"])


def test_the_bytes_of_weights_are_those_of_the_files(place: Path) -> None:
    target = load_target(TargetConfig(name="target", device="cpu"))
    save_untrained(place / "drafter", target, load_components(), draft_vocabulary=16)
    found = planned("--target", "target", "--tokens=1K", "drafter.draft_vocabulary=16")
    files = sum(map(tensor_bytes, (place / "target").glob("*.safetensors")))
    assert value(found, "target", "weights") == files
    assert value(found, "target", "weights in bfloat16") == files / 2
    drafter = tensor_bytes(place / "drafter" / "model.safetensors")
    assert value(found, "drafter", "weights") == drafter


@pytest.mark.parametrize("kept", ["auto", "float16", "float8_e4m3"])
def test_the_bytes_of_a_store_are_those_of_its_shards(
    kept: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_in_place(ROOT / "plugins" / "falcon-lab-eagle", place / "site", monkeypatch)
    sequences = pack([Encoded([n + 1] * 16, [True] * 16) for n in range(7)], 16)
    target, taps = load_target(TargetConfig(name="target", device="cpu")), (0, 1, 2, 3)
    plan = plan_store(place / "store", sequences, target, taps=taps, kept=kept, shard_bytes=10_000)
    build_store(plan, sequences, target)
    files = list((place / "store").glob("*.safetensors"))
    assert len(files) > 1
    found = planned(
        *("--target=target", "--tokens=112", "drafter.name=eagle3", "data.length=16"),
        *("drafter.taps=[1,2,3]", "data.feature_store_taps=[0,1]"),
        f"data.feature_store_dtype={kept}",
    )
    assert value(found, "features", "whole store") == sum(map(tensor_bytes, files))


def test_a_target_is_counted_by_its_configuration_alone(place: Path) -> None:
    LLAMA_70B.save_pretrained(place / "large")
    options = ("--tokens=1B", "--devices=8", "data.length=2048")
    found = planned("--target=large", *options)
    assert found["target"]["parameters"] == 70_553_706_496
    assert value(found, "target", "devices for the weights") == 3  # 141 GB by 80 % of 80 GB
    sizes = ("--parameters=70.5537B", "--hidden=8192", "--layers=80", "--vocab=128256")
    by_size = planned(*sizes, *options)
    assert by_size["target"]["parameters"] == pytest.approx(70_553_706_496, rel=1e-3)
    for part, what in (("extraction", "time"), ("training", "time from a store")):
        assert value(by_size, part, what) == pytest.approx(value(found, part, what), rel=1e-3)


def test_hours_follow_tokens_devices_and_what_is_assumed(place: Path) -> None:
    options = ("--target=target", "--hardware=h100")
    one = planned(*options, "--tokens=1M")
    more = planned(*options, "--tokens=2M", "--devices=4", "--utilisation=0.8", "--epochs=3")
    for part, what, factor in (
        ("extraction", "time", 2 / 4 / 2),
        ("training", "time from a store", 3 * 2 / 4 / 2),
        ("regeneration", "time", 2 / 4),
    ):
        ratio = value(more, part, what) / value(one, part, what)
        assert ratio == pytest.approx(factor), (part, what)


def test_the_figures_are_those_of_a_calculation_by_hand(place: Path) -> None:
    found = planned(
        *("--target=target", "--tokens=1M", "--sequences=1", *GIVEN),
        *("drafter.name=falcon", "drafter.draft_vocabulary=16", "glancing.name=none"),
        *("distillation.unroll=2", "data.length=16"),
    )
    cost, drafter = found["target"], found["drafter"]
    reading = 2 * (cost["matrices"] - 64 * 32) + 4 * 4 * 32 * 16  # 4 layers of 32 channels, T = 16
    assert value(found, "extraction", "speed") == pytest.approx(1e12 / (reading + 2 * 64 * 32))
    assert drafter["rows"] == pytest.approx(1, abs=0.05)
    head = 16 * 32
    training = 2 * (6 * drafter["matrices"] + 4 * drafter["rows"] * head) + 2 * head
    assert value(found, "training", "speed from a store") == pytest.approx(1e12 / training)
    cache = 2 * 2 * 8 * 4 * 4 * 8  # keys and values: 2 heads of 8, 4 bytes, 4 layers, 8 positions
    assert value(found, "regeneration", "speed") == pytest.approx(1e9 / (cost["moved"] + cache))


def test_what_is_assumed_stands_beside_the_figures(place: Path) -> None:
    said = run("plan", "--target=target", "--tokens=1M", "--devices=2", "--utilisation=0.33")
    said = " ".join(said.split())  # wherever a line ends
    for word in ("33%", "2 × h100", "data sheet", "not counted", "sharded over 2 devices"):
        assert word in said, word


def test_a_run_is_held_against_the_plan(place: Path) -> None:
    target = load_target(TargetConfig(name="target", device="cpu"))
    folder = place / "run"
    save_untrained(folder / "drafter", target, load_components())
    options = ["target.name=target", "glancing.name=none", "data.length=16", "data.batch_size=2"]
    (folder / "experiment.yaml").write_text(dump(load_experiment(None, options)))
    plan = planned("--target=target", "--tokens=1M", *GIVEN, *options[1:])
    seconds = 2 * 16 / value(plan, "training", "speed from a store")
    parts = dict.fromkeys(("student", "loss", "backward", "optimizer"), seconds / 2)
    line = {f"train/time/{part}": took for part, took in (parts | {"teacher": 1.0}).items()}
    (folder / "history.jsonl").write_text(json.dumps({"step": 1, **line}) + "\n")
    found = planned("--measured=run", *GIVEN)["compared"]
    rows = {row["what"]: row for row in found}
    assert rows["drafter"]["ratio"] == 1
    assert rows["teacher"]["measured"] == 2 * 16
    assert rows["student"]["ratio"] == pytest.approx(1 / 2)
    assert rows["student"]["share_of_peak"] == pytest.approx(1 / 2)
    assert "measured / planned" in run("plan", "--measured=run", *GIVEN)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--target"),
        (["--target=target"], "--tokens"),
        (["--target=target", "--tokens=many"], "--tokens"),
        (["--target=target", "--tokens=1B", "--hardware=abacus"], "h100"),
        (["--target=target", "--tokens=1B", "--memory=80"], None),
        (["--parameters=70B", "--tokens=1B"], "--hidden"),
        (["--hidden=64", "--target=target", "--tokens=1B"], "--parameters"),
        (
            ["--parameters=1M", "--hidden=8192", "--layers=80", "--vocab=9", "--tokens=1B"],
            "--parameters",
        ),
        (["--target=nowhere", "--tokens=1B"], "nowhere"),
        (["--target=target", "--tokens=1B", "drafter.nam=falcon"], "drafter.nam"),
        (["--measured=target"], "experiment.yaml"),
        (["target"], "--target"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(
    words: list[str], named: str | None, place: Path
) -> None:
    if named is None:
        run("plan", *words)
    else:
        assert named in refused("plan", *words)


def test_a_mixture_of_experts_needs_to_know_what_a_token_uses(place: Path) -> None:
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    ).save_pretrained(place / "mixture")
    words = ("--target=mixture", "--tokens=1M")
    assert "--active" in refused("plan", *words)
    assert planned(*words, "--active=10K")["target"]["matrices"] == 10_000


def test_nothing_else_imports_the_arithmetic() -> None:
    scale = {name for name in GRAPH if name.startswith("falcon_lab.studies.scale")}
    users = {name for name, found in GRAPH.items() if found & scale} - scale
    assert users == {"falcon_lab.commands.plan"}
