"""``falcon-lab bench`` on tiny random models from disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.studies.bench import machine
from running import invoke, refused, run
from saved_models import PROMPTS, save_models

SMALL = ["--max-new-tokens=12", "evaluation.repeats=1", PROMPTS]
THEIRS = ["HF generate", "HF static cache", "HF assisted", "HF prompt lookup"]
TREES = ["chain depth=3", "static"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.SIDE, "cpu", 128)
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "")


@pytest.fixture(scope="module")
def everything(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a benchmark of all methods printed, and the folder with its files."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(machine.SIDE, "cpu", 128)
        printed = run(
            *("bench", "--drafter", models / "drafter", "--assistant", models / "assistant"),
            *("--tree", "chain,depth=3", "--tree", "static"),
            *("--json", out / "bench.json", "--profile", out / "trace.json", *SMALL),
        )
    return printed, out


@pytest.fixture
def results(everything: tuple[str, Path]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((everything[1] / "bench.json").read_text("utf-8"))
    return found


def test_every_method_has_a_row_and_writes_plain_decodings_tokens(results: dict[str, Any]) -> None:
    assert list(results["methods"]) == ["plain", *THEIRS, "plain, lean forward", *TREES]
    tokens: dict[str, list[Any]] = {}
    for row in results["rows"]:
        tokens.setdefault(row["method"], []).append([turn["tokens"] for turn in row["turns"]])
    for name, summary in results["methods"].items():
        assert tokens[name] == tokens["plain"], name
        assert summary["identical_share"] == (None if name == "plain" else 1)
        assert summary["prompts"] == 2
    assert results["headline"] in TREES
    assert results["left_out"] == {"llama.cpp": "the target is no GGUF file"}


def test_the_json_holds_the_machine_versions_and_every_methods_figures(
    results: dict[str, Any],
) -> None:
    assert results["versions"]["torch"]
    assert results["hardware"]["cores"] >= 1
    assert results["components"]["static"]["drafter"]["name"] == "falcon"
    found = results["bench"]
    assert set(found) == {"machine", "cost", "methods"}
    assert found["machine"]["bytes_per_second"] > 0
    assert found["machine"]["operations_per_second"] > 0
    assert found["cost"]["weight_bytes"] > 0
    assert list(found["methods"]) == list(results["methods"])
    for name, figures in found["methods"].items():
        assert set(figures) == {"split", "memory", "floor"}
        assert figures["memory"] is None or figures["memory"]["growth"] >= 0
        ours = name not in THEIRS
        assert (figures["split"] is not None) == (figures["floor"] is not None) == ours, name
    for name in TREES:
        shares = found["methods"][name]["split"]
        assert list(shares) == ["draft", "verify", "accept", "commit", "overhead"]
        assert sum(shares.values()) == pytest.approx(100)
        assert found["methods"][name]["floor"]["rows"] > 1
    assert found["methods"]["plain"]["floor"]["rows"] == 1


def test_the_tables_name_every_method_and_the_machine(everything: tuple[str, Path]) -> None:
    printed, _ = everything
    for name in ["plain", *THEIRS, *TREES]:
        assert any(line.startswith(f"{name} ") for line in printed.splitlines()), name
    for words in ("over HF", "memory MB", "accept", "of floor %", "GB/s in copies", "GFLOP/s in"):
        assert words in printed


def test_the_profile_is_a_chrome_trace_of_our_loops_alone(everything: tuple[str, Path]) -> None:
    trace = json.loads((everything[1] / "trace.json").read_text("utf-8"))
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"plain", "plain, lean forward", *TREES} <= names
    assert {"prefill", "draft", "verify", "accept", "observe", "tree"} <= names
    assert not names & set(THEIRS)


def test_with_the_lean_forward_the_modules_stand_beside_it(models: Path, tmp_path: Path) -> None:
    run(
        *("bench", "--target", models / "target", "--method=plain", "--json", tmp_path / "b.json"),
        *("target.lean=true", *SMALL),
    )
    found = json.loads((tmp_path / "b.json").read_text("utf-8"))
    assert list(found["methods"]) == ["plain", "plain, HF modules"]
    assert found["headline"] is None


def test_a_training_free_drafter_can_be_named(models: Path) -> None:
    printed = run(
        *("bench", "--target", models / "target", "--method=drafter", "--tree=chain,depth=2"),
        *("drafter.name=falcon", *SMALL),
    )
    assert "chain depth=2" in printed
    assert "HF" not in printed.replace("over HF", "")


def test_what_is_not_measured_says_why(models: Path) -> None:
    printed = run("bench", "--target", models / "target", "--method=hf", *SMALL)
    assert "Left out" not in printed
    printed = run("bench", "--target", models / "target", *SMALL)
    assert "Left out: HF assisted (no assistant was named)" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "nowhere"], "nowhere: no saved drafter here"),
        (["--tree", "static"], "--tree needs a drafter: --drafter DIR or drafter.name=NAME"),
        (["drafter.name=falcon", "--tree=chain,dept=3"], "override 'tree.dept=3': tree.dept"),
        (["drafter.name=falcon", "--tree=chian"], "override 'tree.name=chian': tree.name: no"),
        (["--method=hf-assisted"], "--method hf-assisted needs --assistant MODEL"),
        (["evaluation.repeat=2"], "override 'evaluation.repeat=2': evaluation.repeat: unknown"),
    ],
)
def test_what_the_user_can_mend_is_said_in_one_line(arguments: list[str], message: str) -> None:
    assert refused("bench", *arguments).startswith(f"falcon-lab: {message}")


def test_a_folder_that_is_no_target_or_assistant_is_one_line(models: Path) -> None:
    own = ("--target", models / "target", *SMALL)
    assert "target nowhere/at/all cannot be loaded" in refused(
        "bench", *own, "--assistant", "nowhere/at/all"
    )


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    done = invoke("bench", "--method=hf-beam")
    assert done.exit_code == 2
    assert "'hf-static'" in done.stderr
