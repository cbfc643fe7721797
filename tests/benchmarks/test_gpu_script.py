"""``benchmarks/gpu.py`` in small, on a CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fakes.recording import Repeating
from falcon_bench import gpu_shape
from falcon_lab.errors import FalconLabError
from falcon_lab.studies.bench import machine
from running import EXPERIMENTS, ROOT, run


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(machine.SIDE, "cpu", 128)
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_a_shape_is_held_against_its_floor_and_an_assumed_acceptance_says_so(
    script: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorder = Repeating()
    monkeypatch.setattr(gpu_shape, "recorder_for", lambda _: recorder)
    results = read(script.main(["shape", "toy", "tokens=24"], tmp_path))
    assert recorder.replays > 0
    assert results["notes"] == []
    assert [found["context"] for found in results["contexts"]] == [12, 40]
    for found in results["contexts"]:
        loops = found["loops"]
        assert {*loops} == {"plain, graphs", "plain, eager", "HF generate", "HF static cache"}
        moved = results["cost"]["weight_bytes"] / results["machine"]["bytes_per_second"]
        for rate in loops.values():
            assert rate["floor_reached"] > moved / rate["seconds"]
        assert [row["nodes"] for row in found["passes"]] == [1, 4]
        assert found["passes"][0]["graphs_over_one"] == 1
        for row in found["assumed"]:
            assert row["tau"] == pytest.approx(1 + row["drafts"], rel=0.25)
            plain = loops["plain, graphs"]["seconds"]
            assert row["over_plain"] == pytest.approx(plain / row["seconds"])
        assert {row["source"] for row in found["assumed"]} == {
            "assumed",
            "the paper's, MT-bench",
            "the paper's, HumanEval",
            "the paper's, GSM8K",
        }
    shown = capsys.readouterr().out
    assert shown.count("drafts a round (assumed)") == 2
    assert len(results["verdicts"]) == 8
    assert all(line in shown for line in results["verdicts"])


def test_without_graphs_it_says_so(script: Any, tmp_path: Path) -> None:
    words = ["shape", "toy", "contexts=8", "accepted=1", "static=false", "attention=sdpa"]
    path = script.main(words, tmp_path)
    assert path.name.endswith("-gpu-shape-8-cpu.json")
    results = read(path)
    assert results["notes"] == [
        "there are no CUDA graphs on cpu: passes of that name are eager too"
    ]
    [found] = results["contexts"]
    assert "HF static cache" not in found["loops"]
    assert len(found["assumed"]) == 4


def test_a_target_and_its_drafter_are_trained_once_and_measured(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"question_id": name, "turns": [f"def {name}(a):\n"]} for name in ("one", "two")]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    work = tmp_path / "work"
    words = ["real", "toy", f"work={work}", f"prompts={prompts}"]
    assert script.main([*words, "until=target"], tmp_path) is None
    made = (work / "target" / "loss.json").stat().st_mtime_ns
    assert not (work / "drafter.json").exists()
    assert script.main([*words, "until=drafter"], tmp_path) is None
    trained = (work / "drafter.json").stat().st_mtime_ns
    results = read(script.main([*words, "temperatures=0"], tmp_path))
    assert (work / "target" / "loss.json").stat().st_mtime_ns == made
    assert (work / "drafter.json").stat().st_mtime_ns == trained
    assert results["target"]["steps"] == results["drafter"]["steps"] == 3
    assert results["target"]["nats_per_token"] < 7
    assert [*results["measured"]] == ["T=0"]
    for measured in results["measured"].values():
        assert {"plain", "HF generate", "chain depth=4"} <= {*measured["methods"]}
        assert all(not {"tokens", "text"} & {*t} for row in measured["rows"] for t in row["turns"])
    identical = results["measured"]["T=0"]["methods"]["chain depth=4"]["identical_share"]
    assert identical == 1
    assert "T=0" in capsys.readouterr().out


def test_the_comparison_for_a_gpu_runs_on_the_target_that_was_trained(
    script: Any, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    script.main(["real", "toy", f"work={work}", "until=target"], tmp_path)
    small = {
        "target": [f"name={work / 'target'}", "dtype=float32", "device=cpu", "attention=sdpa"],
        "data": [f"corpus={work / 'sources.jsonl'}", "length=64", "batch_size=2", "documents=40"],
        "trainer": ["max_steps=2", "precision=32-true", "accelerator=cpu"],
        "evaluation": ["max_new_tokens=6", "prompts.limit=1", "prompts.prompt_tokens=12"],
        "decoding": ["compile=none"],
    }
    words = [f"{part}.{word}" for part, of_part in small.items() for word in of_part]
    words += [f"out={tmp_path / 'out'}", "only=[falcon,lookup]", "budgets=[chain-4]"]
    run("compare", EXPERIMENTS / "compare-gpu.yaml", *words)
    results = read(tmp_path / "out" / "compare-gpu.json")
    assert results["target"]["name"] == str(work / "target")
    assert [row["head"] for row in results["rows"]] == ["falcon", "lookup"]
    assert all(row["identical_share"] == 1 for row in results["rows"])


def test_steps_are_those_that_fit_into_the_time(script: Any, tmp_path: Path) -> None:
    words = ["real", "toy", f"work={tmp_path}", "until=target", "steps=null", "minutes=0.003"]
    script.main(words, tmp_path)
    assert read(tmp_path / "target" / "loss.json")["steps"] >= 1


def test_attention_is_the_script_of_that_name(script: Any, tmp_path: Path) -> None:
    small = ["shapes=2x2x8", "contexts=8", "rows=1", "seconds=0.001"]
    path = script.main(["attention", *small], tmp_path)
    assert "-attention-" in path.name


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "which check"),
        (["speed"], "which check"),
        (["shape", "toy", "layer=3"], "no key layer"),
        (["real", "until=never"], "until=never"),
    ],
)
def test_what_is_not_understood_is_refused(
    script: Any, tmp_path: Path, words: list[str], what: str
) -> None:
    with pytest.raises(SystemExit, match=what):
        script.main(words, tmp_path)


def test_keys_go_to_the_plan_and_to_the_model_s_shape(script: Any) -> None:
    words = ["layers=3", "hidden=64", "contexts=1,2", "accepted=0.5", "attention=sdpa"]
    plan = script.with_values(gpu_shape.TOY, script.pairs(words))
    assert (plan.shape.layers, plan.shape.hidden, plan.shape.heads) == (3, 64, 4)
    assert (plan.contexts, plan.accepted, plan.attention) == ((1, 2), (0.5,), "sdpa")
    assert gpu_shape.TOY.shape.layers == 2


def test_a_machine_without_sources_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from falcon_bench import gpu_training

    monkeypatch.setattr(gpu_training, "python_sources", lambda: iter(()))
    with pytest.raises(FalconLabError, match="no Python sources"):
        gpu_training.gather_sources(tmp_path / "sources.jsonl", 1, print)
