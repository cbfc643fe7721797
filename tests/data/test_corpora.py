import json
from itertools import islice
from pathlib import Path

import pytest

from falcon_lab.data import corpora
from falcon_lab.data.corpora import corpus, corpus_fingerprint, sections
from falcon_lab.data.documents import Document
from falcon_lab.data.generated.corpus import SPLITS, generate_modules
from falcon_lab.errors import FalconLabError


def ids(name: str, split: str, **options: int) -> list[str]:
    return [document.id for document in corpus(name, split=split, **options)]


def chats(folder: Path, count: int) -> Path:
    file = folder / "chats.jsonl"
    lines = [json.dumps({"text": f"text {number}"}) for number in range(count)]
    file.write_text("\n".join(lines), "utf-8")
    return file


def test_the_generated_corpus_is_what_the_generator_gives() -> None:
    documents = list(corpus("generated", split="validation", limit=3, seed=4))
    assert [document.text for document in documents] == list(generate_modules("validation", 3, 4))
    assert documents[1].id == "generated/validation/4/1"


def test_the_generated_corpus_without_a_limit_can_be_begun() -> None:
    assert len(list(islice(corpus("generated", split="train"), 5))) == 5


def test_the_standard_library_is_split_without_overlap_into_about_90_5_5() -> None:
    names = {split: set(ids("stdlib", split)) for split in SPLITS}
    total = sum(map(len, names.values()))
    assert len(set().union(*names.values())) == total > 300
    assert 0.85 < len(names["train"]) / total < 0.95
    assert all(0.02 < len(names[split]) / total < 0.09 for split in ("validation", "heldout"))
    assert not any("/test" in name or "site-packages" in name for name in names["train"])


def test_a_limit_takes_the_beginning_of_an_order_that_the_seed_decides() -> None:
    whole = ids("stdlib", "validation", seed=1)
    assert ids("stdlib", "validation", seed=1, limit=4) == whole[:4]
    assert sorted(whole) == sorted(ids("stdlib", "validation", seed=2))
    assert whole != ids("stdlib", "validation", seed=2)


def test_a_folder_is_read_down_to_its_leaves_and_what_is_no_text_is_passed_over(
    tmp_path: Path,
) -> None:
    for number in range(6):
        (tmp_path / "deep" / "er").mkdir(parents=True, exist_ok=True)
        (tmp_path / "deep" / "er" / f"{number}.py").write_text(f"x = {number}\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "picture.png").write_bytes(b"x")
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden.py").write_text("x\n")
    found = {split: list(corpus(str(tmp_path), split=split)) for split in SPLITS}
    assert [len(found[split]) for split in SPLITS] == [4, 1, 1]
    texts = [document.text for documents in found.values() for document in documents]
    assert sorted(map(str, texts)) == [f"x = {number}\n" for number in range(6)]
    assert found["train"][0].source.endswith(".py:1")


def test_splits_of_a_file_do_not_meet_and_lose_nothing(tmp_path: Path) -> None:
    file = chats(tmp_path, 100)
    found = [ids(str(file), split) for split in SPLITS]
    assert [len(names) for names in found] == [90, 5, 5]
    assert len({name for names in found for name in names}) == 100


def test_a_document_says_file_and_line(tmp_path: Path) -> None:
    file = chats(tmp_path, 5)
    sources = {d.source for split in SPLITS for d in corpus(str(file), split=split)}
    assert sources == {f"{file}:{line}" for line in range(1, 6)}


def test_a_long_text_is_cut_into_sections_at_empty_lines() -> None:
    text = "".join(f"line {number}\n" + "\n" * (number % 10 == 9) for number in range(5000))
    parts = list(sections(text))
    assert "".join(part for _, part in parts) == text
    assert len(parts) > 3
    assert all(len(part) < 1.1 * corpora.SECTION for _, part in parts)
    assert all(part.endswith("\n\n") for _, part in parts[:-1])
    line, part = parts[1]
    assert text.splitlines()[line - 1] == part.splitlines()[0]


def test_a_text_without_empty_lines_is_cut_all_the_same() -> None:
    parts = list(sections("abcdefghi\n" * 10_000))
    assert max(len(part) for _, part in parts) <= 2 * corpora.SECTION


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_corpus_is_an_error_that_names_the_path(tmp_path: Path, content: str) -> None:
    for name in ("a.jsonl", "a.txt"):
        file = tmp_path / name
        file.write_text(content)
        with pytest.raises(FalconLabError, match=rf"{name}: "):
            corpus(str(file), split="train")
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(FalconLabError, match=r"corpus is empty, no readable text files"):
        corpus(str(tmp_path), split="train")


def test_too_few_documents_unknown_names_splits_and_limits_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FalconLabError, match=r"2 document\(s\) found; at least 3"):
        corpus(str(chats(tmp_path, 2)), split="train")
    with pytest.raises(FalconLabError, match="did you mean 'generated'"):
        corpus("generatd", split="train")
    with pytest.raises(FalconLabError, match="no split 'test'"):
        corpus("generated", split="test")
    with pytest.raises(FalconLabError, match="at least 1 document"):
        corpus("generated", split="train", limit=0)


def test_a_fingerprint_changes_with_the_content(tmp_path: Path) -> None:
    file = chats(tmp_path, 5)
    before = corpus_fingerprint(str(file))
    assert corpus_fingerprint(str(file)) == before
    assert corpus_fingerprint(str(tmp_path)) == before
    file.write_text(file.read_text().replace("text 1", "text 9"))
    assert corpus_fingerprint(str(file)) != before
    names = {corpus_fingerprint(name) for name in ("generated", "stdlib")}
    assert len(names) == 2
    with pytest.raises(FalconLabError, match="no such file"):
        corpus_fingerprint(str(tmp_path / "gone"))


def test_chats_and_texts_may_stand_in_one_folder(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(chat)}\n" * 2)
    (tmp_path / "b.md").write_text("# text\n")
    found: list[Document] = [d for split in SPLITS for d in corpus(str(tmp_path), split=split)]
    assert sum(d.messages is not None for d in found) == 2
    assert sum(d.text is not None for d in found) == 1
