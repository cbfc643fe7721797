from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from diffusion_cases import target
from falcon_lab_diffusion import CpsConfig
from falcon_lab_diffusion.__main__ import main
from falcon_lab_diffusion.path_search import PathSearch
from falcon_lab_diffusion.trigrams import count_trigrams, read_arpa, write_arpa

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext

TEXTS = [[1, 2, 3, 1, 2, 4], [1, 2, 3]]


def probability(model: object, before: list[int], token: int) -> float:
    return math.exp(model.log_probability(before, token))  # type: ignore[attr-defined]


def test_probabilities_are_those_of_a_plain_count() -> None:
    model = count_trigrams(TEXTS, discount=0.5)
    # 9 tokens: 1 1 1 2 2 2 3 3 4. Behind 1 2: 3 3 4. Behind 2: 3 3 4. Behind 3: 1.
    assert probability(model, [], 2) == pytest.approx(3 / 9)
    assert probability(model, [1, 2], 3) == pytest.approx(1.5 / 3)
    assert probability(model, [1, 2], 4) == pytest.approx(0.5 / 3)
    assert probability(model, [9, 2], 3) == pytest.approx(1.5 / 3)  # by the bigram
    # What is left behind 2 is 2 · 0.5 / 3, shared by 1 and 2, which have 3/9 each.
    assert probability(model, [2], 1) == pytest.approx(1 / 3 * 1 / 2)
    assert probability(model, [1, 2], 1) == pytest.approx(1 / 3 * (1 / 3 * 1 / 2) / (1 - 2 / 3))
    assert model.log_probability([1, 2], 77) < -20


def test_probabilities_sum_to_one() -> None:
    draws = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 7, (50,), generator=draws).tolist() for _ in range(3)]
    for least in (1, 2):
        model = count_trigrams(texts, least=least)
        for before in ([], [3], [3, 1], [0, 6], [5, 5], [9, 2]):
            total = sum(probability(model, before, token) for token in range(7))
            assert total == pytest.approx(1), before


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    model, path = count_trigrams(TEXTS), tmp_path / "a.arpa"
    write_arpa(model, path)
    again = read_arpa(path)
    for before in ([1, 2], [2], [7, 7], [3, 1]):
        for token in range(6):
            ours, theirs = (one.log_probability(before, token) for one in (model, again))
            assert ours == pytest.approx(theirs, abs=1e-4)
    builder = PathSearch(CpsConfig(ngrams=str(path)), BuildContext(target("llama"), 4, 1))
    assert builder.max_depth == 4


def test_a_corpus_is_counted_by_a_command(tmp_path: Path) -> None:
    one = target("llama")
    for part in (one.model, one.tokenizer):
        part.save_pretrained(tmp_path / "target")
    (tmp_path / "texts").mkdir()
    for name in "abc":
        (tmp_path / "texts" / f"{name}.txt").write_text(f"{name} b c a b d " * 8, "utf-8")
    words = [str(tmp_path / "texts"), str(tmp_path / "out.arpa"), "--least", "1"]
    done = CliRunner().invoke(main, ["trigrams", str(tmp_path / "target"), *words])
    assert done.exit_code == 0, done.stderr
    assert len(read_arpa(tmp_path / "out.arpa").log_p) > 3
    refused = CliRunner().invoke(main, ["trigrams", str(tmp_path / "none"), *words])
    assert refused.exit_code == 2
    assert str(tmp_path / "none") in refused.stderr


class Tokens:
    """A tokenizer that knows two words."""

    def get_vocab(self) -> dict[str, int]:
        return {"the": 4, "cat": 5}


ARPA = """
\\data\\
ngram 1=4
ngram 2=1

\\1-grams:
-1.0\t<unk>
-2.0\t<s>\t-0.5
-0.5\tthe\t-0.3
-0.7\tcat

\\2-grams:
-0.2\tthe cat

\\4-grams:
-0.2\tthe cat the cat

\\end\\
"""


def test_words_of_others_are_tokens_of_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "words.arpa"
    path.write_text(ARPA, encoding="utf-8")
    model = read_arpa(path, Tokens())
    assert model.log_probability([4], 5) == pytest.approx(-0.2 * math.log(10))
    assert model.log_probability([4], 4) == pytest.approx(-0.8 * math.log(10))
    assert model.log_probability([5], 99) == pytest.approx(-1.0 * math.log(10))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ARPA.replace("-0.7\tcat", "cat"), "no 1-gram"),
        (ARPA.replace("-0.7", "nan"), "line 10"),
        ("hello", "no n-grams"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "bad.arpa"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FalconLabError, match=found):
        read_arpa(path, Tokens())
    with pytest.raises(FalconLabError, match="nowhere"):
        read_arpa(tmp_path / "nowhere.arpa")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FalconLabError, match=r"bad\.arpa"):
        read_arpa(path)
