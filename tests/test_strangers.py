"""Every file that is read back, changed in every way that a stranger or a full disk may change it.

What is read afterwards is refused in one line that names the file, or read; nothing else is raised,
and reading changes no file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.config.overrides import parse_overrides
from falcon_lab.config.saved import read_description, read_facts, run_experiment, target_overrides
from falcon_lab.data.documents import load_template, read_documents
from falcon_lab.data.feature_index import StoreIndex, read_index, the_same
from falcon_lab.errors import FalconLabError
from falcon_lab.history import read_history, series
from falcon_lab.measure.journal import Journal
from falcon_lab.measure.prompts import read_prompts
from falcon_lab.measure.results import build_results, load_results, refuse_foreign
from falcon_lab.model.checkpoint import check_weights
from falcon_lab.pretraining.quality import Quality, read_loss, read_quality
from measuring import EXPERIMENT, HEADER, TARGET, TREE, measurement, row

DESCRIPTION = {
    "format": 1,
    "falcon_lab": "0.1",
    "drafter": {"name": "falcon", "block": 2},
    "provenance": {"name": "falcon", "distribution": "falcon-lab", "version": "0.1"},
    "target": {"name": "tiny", "revision": None, "fingerprint": "f", "hidden_size": 8},
}
INDEX = StoreIndex("t", "d", 3, 4, 8, "float32", 2)
CHAT = {"id": 1, "messages": [{"role": "user", "content": "a"}]}
TURN = asdict(row("x", wall=1.0, accepted=[1], tokens=[1, 2]).turns[0])
ANSWER = {"repeat": 0, "prompt": "p", "method": "plain", "process": "a", "turns": [TURN]}


def results() -> dict[str, Any]:
    made = build_results(
        measurement(2), experiment=EXPERIMENT, target=TARGET, header=HEADER, trees=[TREE]
    )
    return dict(json.loads(json.dumps(made)))


@dataclass(frozen=True)
class Read:
    """A file's name, what it holds, and who reads it."""

    name: str
    content: Any
    readers: tuple[Callable[[Path], object], ...]


FILES = [
    Read(
        "config.json",
        DESCRIPTION,
        (lambda path: read_description(path.parent), lambda path: target_overrides(path.parent)),
    ),
    Read("training.json", {"target.name": "tiny", "seed": 0}, (read_facts,)),
    Read("results.json", results(), (load_results, refuse_foreign)),
    Read(
        "quality.json",
        Quality(1.0, 1.0, 1.0, 1, True, "well").as_dict(),
        (lambda path: read_quality(path.parent),),
    ),
    Read("loss.json", {"nats_per_token": 1.0}, (lambda path: read_loss(path.parent),)),
    Read(
        "store.json",
        asdict(INDEX),
        (lambda path: the_same(path.parent, read_index(path.parent), INDEX),),
    ),
    Read("rows.jsonl", ANSWER, (lambda path: Journal(path).group(0, "p", ["plain"]),)),
    Read("history.jsonl", {"step": 1, "loss": 0.5}, (lambda p: series(read_history(p), "loss"),)),
    Read("chats.jsonl", CHAT, (lambda path: list(read_documents(path, "a")),)),
    Read(
        "prompts.jsonl",
        {"question_id": 1, "category": "c", "turns": ["a"]},
        (lambda path: list(read_prompts(path)),),
    ),
    Read("sweep.json", {"seed": 1}, (lambda path: parse_overrides([str(path)]),)),
    Read(
        "model.safetensors.index.json",
        {"weight_map": {"a": "b.safetensors"}},
        (lambda path: check_weights(path.parent),),
    ),
    Read("experiment.yaml", {"name": "a", "seed": 1}, (lambda p: run_experiment(p.parent, []),)),
    Read("chat.jinja", "{{ messages }}", (lambda path: load_template(str(path)),)),
]

VALUES = ["null", '"x"', "[]", "{}", "5", "-1", "0", "1e999", "true", '"${oc.env:HOME}"', "[[1]]"]
WHOLE = [*VALUES, "", "{", "\0\0", "[" * 20_000, '{"a":' * 20_000, '"\\ud83d"', '{"1": {}}']
PLACE = "@place@"


def places(tree: Any, depth: int = 2) -> Iterator[list[Any]]:
    """Every key of a tree; of a list the first item's."""
    items = tree.items() if isinstance(tree, dict) else list(enumerate(tree))[:1]
    for key, value in items:
        yield [key]
        if depth > 1 and isinstance(value, dict | list):
            yield from ([key, *below] for below in places(value, depth - 1))


def changed(content: Any) -> Iterator[bytes]:
    """The content with every key left out, and with every other value in its place."""
    text = json.dumps(content)
    yield from (each.encode() for each in WHOLE)
    yield from (text[:length].encode() for length in (1, len(text) // 2, len(text) - 1))
    yield b"\xff\xfe" + text.encode("utf-16-le")
    yield b"\xef\xbb\xbf" + text.encode() + b"\r\n"
    for path in places(content) if isinstance(content, dict) else ():
        tree = deepcopy(content)
        node = tree
        for key in path[:-1]:
            node = node[key]
        del node[path[-1]]
        yield json.dumps(tree).encode()
        if isinstance(node, dict):
            node[path[-1]] = PLACE
        else:
            node.insert(0, PLACE)
        for value in VALUES:
            yield json.dumps(tree).replace(f'"{PLACE}"', value).encode()


def refused_or_read(read: Callable[[Path], object], path: Path) -> None:
    said = ""
    try:
        read(path)
    except FalconLabError as error:
        said = str(error)
    assert "\n" not in said
    assert not said or path.name in said or path.parent.name in said


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_changed_file_is_refused_by_name_or_read(file: Read, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / file.name
    for content in changed(file.content):
        path.write_bytes(content)
        for read in file.readers:
            refused_or_read(read, path)
        assert path.read_bytes() == content


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_something_else_in_a_files_place_is_refused_or_no_file(file: Read, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / file.name
    for read in file.readers:
        refused_or_read(read, path)
        path.mkdir()
        refused_or_read(read, path)
        path.rmdir()
        for place in ("nowhere/at/all", file.name, "/dev/null"):
            path.symlink_to(place)
            refused_or_read(read, path)
            path.unlink()
