"""``falcon-lab search`` finds which layers a target that drafts for itself does not need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from falcon_lab.testing.targets import tiny_model, tiny_tokenizer
from installing import install_in_place
from running import ROOT, refused, run

USELESS = [1, 3]
OVER = "--over=drafter.skip_attention=0..3"
OTHERS = ["one two", "three, four"]
PROMPTS = "evaluation.prompts.texts=[abc def, hello there world]"


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target, some of whose attentions add nothing."""
    install_in_place(ROOT / "plugins" / "falcon-lab-selfspec", tmp_path / "site", monkeypatch)
    monkeypatch.chdir(tmp_path)
    model = tiny_model("llama", vocab=64, layers=4)
    with torch.no_grad():
        model.lm_head.weight[0] = 0.0  # no text ends early
        for layer in USELESS:
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer(64).save_pretrained(tmp_path / "target")
    others = [{"question_id": n, "turns": [text]} for n, text in enumerate(OTHERS)]
    Path("others.jsonl").write_text("\n".join(map(json.dumps, others)))
    Path("small.yaml").write_text(
        f"target: {{name: {tmp_path / 'target'}, lean: true}}\n"
        "tree: {name: chain, depth: 3}\n"
        "evaluation: {methods: {mine: {drafter: {name: selfspec}}}}\n"
    )
    return tmp_path


def command(*more: str) -> list[str]:
    given = ["search", "small.yaml", "--method=mine", "--by=cost", "--prompts=others.jsonl"]
    return [*given, "--tokens=20", "--node-cost=0.3", "--sampler=tpe", OVER, PROMPTS, *more]


@pytest.mark.usefixtures("target")
def test_the_search_finds_what_adds_nothing_and_goes_on_where_it_stopped() -> None:
    pytest.importorskip("optuna")
    run(*command("--attempts=4"))
    printed = run(*command("--attempts=15"))
    assert "100% of" in printed
    found = yaml.safe_load(Path("searched/searched.yaml").read_text("utf-8"))
    assert found["evaluation"]["methods"]["mine"]["drafter"] == {
        "name": "selfspec",
        "skip_attention": USELESS,
    }
    lines = [json.loads(line) for line in Path("searched/search.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    assert len({str(line.get("point")) for line in lines}) == 16
    included = run("run", "small.yaml", "searched/searched.yaml", "--dry-run")
    assert "skip_attention" in included


@pytest.mark.usefixtures("target")
def test_what_cannot_be_searched_is_refused_in_one_line() -> None:
    pytest.importorskip("optuna")
    assert "--method other" in refused(*command(), "--method=other")
    assert "no option of selfspec" in refused(*command(), "--over=drafter.skip=1..2")
    assert "drafter" in refused(*command(), "evaluation.methods.mine.drafter.name=lookup")
