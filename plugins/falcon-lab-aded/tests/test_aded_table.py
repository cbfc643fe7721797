from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aded_cases import drafter, table_of, target
from click.testing import CliRunner
from falcon_lab_aded.__main__ import main
from falcon_lab_aded.counting import Sample, build_table
from falcon_lab_aded.successors import NONE
from falcon_lab_aded.table import TrigramTable

from falcon_lab.errors import FalconLabError

V = 7


def plain_count(documents: list[list[int]], most: int) -> dict[int, list[tuple[int, float]]]:
    """Count tri-grams one by one; context -> its likeliest successors with their shares."""
    found: dict[int, Counter[int]] = {}
    for text in documents:
        for a, b, c in zip(text, text[1:], text[2:], strict=False):
            found.setdefault(a * V + b, Counter())[c] += 1
    return {
        context: [
            (token, count / sum(of.values()))
            for token, count in sorted(of.items(), key=lambda item: (-item[1], item[0]))[:most]
        ]
        for context, of in found.items()
    }


@pytest.mark.parametrize("most", [2, 12])
def test_a_table_is_a_plain_count_of_its_documents(most: int, tmp_path: Path) -> None:
    draw = Random(0)
    documents = [[draw.randrange(V) for _ in range(draw.randrange(30))] for _ in range(20)]
    made = table_of(documents, V, most)
    made.save(tmp_path / "table.safetensors")
    expected = plain_count(documents, most)
    for table in (made, TrigramTable.open(tmp_path / "table.safetensors")):
        assert len(table) == len(expected)
        for context in range(V * V):
            found = table(context)
            pairs = [*zip(found.tokens, found.scores, strict=True)]
            assert pairs == expected.get(context, [])


def test_what_was_never_seen_has_no_successors() -> None:
    table = table_of([[1, 2, 3]], V)
    assert table(1 * V + 2).tokens == [3]
    assert table(6 * V + 6) is NONE
    assert table(0) is NONE


class Counting:
    """A tokenizer that counts the documents that it is given."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.documents = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.documents += len(texts)
        return self.inner(texts, **options)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    draw = Random(1)
    lines = ["".join(draw.choices("abcd ", k=30)) for _ in range(20)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), "utf-8")
    return path


def test_a_count_that_was_killed_goes_on_and_gives_the_same_table(
    corpus: Path, tmp_path: Path
) -> None:
    tokenizer = Counting(target().tokenizer)
    sample = Sample(str(corpus), part=4)

    def end(documents: int) -> None:
        if tokenizer.documents == 12:
            raise KeyboardInterrupt

    build_table(sample, tokenizer, 12, tmp_path / "whole.safetensors")
    documents, tokenizer.documents = tokenizer.documents, 0
    with pytest.raises(KeyboardInterrupt):
        build_table(sample, tokenizer, 12, tmp_path / "t.safetensors", end)
    assert not (tmp_path / "t.safetensors").exists()
    table, there = build_table(sample, tokenizer, 12, tmp_path / "t.safetensors")
    assert not there
    assert tokenizer.documents == documents
    whole = TrigramTable.open(tmp_path / "whole.safetensors")
    assert table.facts == whole.facts
    assert [table(each) for each in range(144)] == [whole(each) for each in range(144)]
    assert table.facts["documents"] == str(documents)
    names = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")}
    assert names == {"texts.jsonl", "t.safetensors", "whole.safetensors"}
    assert build_table(sample, tokenizer, 12, tmp_path / "t.safetensors")[1]
    assert tokenizer.documents == documents


def test_what_is_no_table_of_the_target_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "table.safetensors", target()
    with pytest.raises(FalconLabError, match="cannot be read"):
        drafter(model, table=str(path))
    for content in (b"", b"no table", b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(FalconLabError, match="no table of tri-grams"):
            drafter(model, table=str(path))
    table_of([[1, 2, 3]], 12).save(path)
    with pytest.raises(FalconLabError, match="another tokenizer"):
        drafter(model, table=str(path))


def test_the_command_builds_a_table_and_knows_it_again(corpus: Path, tmp_path: Path) -> None:
    model, out = target(), tmp_path / "out" / "table.safetensors"
    model.model.save_pretrained(tmp_path / "target")
    model.tokenizer.save_pretrained(tmp_path / "target")
    words = ["build", str(corpus), "--target", str(tmp_path / "target"), "--out", str(out)]
    first, second = (CliRunner().invoke(main, words) for _ in range(2))
    assert first.exit_code == second.exit_code == 0
    assert "pairs of tokens" in first.stdout
    assert "was there already" in second.stdout
    assert drafter(model, table=str(out)).block == 4
    wrong = CliRunner().invoke(main, ["build", str(tmp_path / "nothing"), *words[2:]])
    assert wrong.exit_code == 2
    assert "no corpus" in wrong.stderr
