from __future__ import annotations

from typing import Any

import pytest
import torch
from falcon_lab_serving.drafting import ROOT, filled
from falcon_lab_serving.host import ServedTarget
from serving_cases import KNOWN, NODES, Server, drafter, host, served, target

from falcon_lab import testing
from falcon_lab.decoding.assembling import assemble
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.errors import FalconLabError

PROMPTS = {"a": [1, 2, 3, 4, 5], "b": [7, 3, 7]}
TREES: dict[str, dict[str, Any]] = {
    "chain": {"name": "chain", "depth": 4},
    "dynamic": {"name": "dynamic", "nodes": NODES - 1},
}


@pytest.mark.parametrize("tree", TREES)
def test_a_server_s_texts_are_the_target_s_and_its_rounds_ours(tree: str) -> None:
    server = Server(served(drafter(), TREES[tree]))
    server.admit("a", PROMPTS["a"], chunk=2)
    new = 24
    while len(server.texts["a"]) < len(PROMPTS["a"]) + new:
        server.run()
    written = server.texts["a"][len(PROMPTS["a"]) :]
    assert written[:new] == testing.write(PlainEngine(target()), PROMPTS["a"], new).tokens
    parts = {"tree": TREES[tree], "acceptance": {"name": "greedy"}, "controller": {"name": "fixed"}}
    engine = assemble(target(), drafter(target()), parts, KNOWN)
    ours = testing.write(engine, PROMPTS["a"], len(written)).rounds
    assert server.rounds == len(ours)


def test_requests_come_and_go_and_do_not_disturb_each_other() -> None:
    server = Server(served(drafter(), TREES["dynamic"]))
    server.admit("a", PROMPTS["a"])
    server.run()
    server.admit("b", PROMPTS["b"])
    for _ in range(3):
        server.run()
    server.drafting.leave("a")
    server.admit("a", PROMPTS["a"])  # taken back and read again, as servers do for want of room
    for _ in range(3):
        server.run()
    for name, text in server.texts.items():
        alone = testing.write(PlainEngine(target()), PROMPTS[name], len(text)).tokens
        assert text[len(PROMPTS[name]) :] == alone[: len(text) - len(PROMPTS[name])]


def test_a_request_without_all_features_is_decoded_without_drafts() -> None:
    server = Server(served(drafter(), TREES["chain"]))
    rows = server.features(PROMPTS["a"])
    server.drafting.read("a", 2, rows[2:])  # the server had the first two in a cache
    server.texts["a"] = [*PROMPTS["a"], server.next_token(rows[-1])]
    for _ in range(4):
        server.run()
        assert set(server.trees[0].tokens[1:]) == {0}
    written = server.texts["a"][len(PROMPTS["a"]) :]
    plain = testing.write(PlainEngine(target()), PROMPTS["a"], len(written)).tokens
    assert written == plain


def test_more_requests_than_places_make_room() -> None:
    server = Server(served(drafter(), TREES["chain"], places=1))
    for name, prompt in PROMPTS.items():
        server.admit(name, prompt)
    for _ in range(2):
        server.run()
    for name, text in server.texts.items():
        plain = testing.write(PlainEngine(target()), PROMPTS[name], 12).tokens
        assert text[len(PROMPTS[name]) :] == plain[: len(text) - len(PROMPTS[name])]


def test_a_tree_is_filled_up_below_a_leaf() -> None:
    tree = filled([5, 6, 7], [ROOT, 0, 0], 5)
    assert tree.tokens == [5, 6, 7, 0, 0]
    assert tree.parents == [ROOT, 0, 0, 2, 3]
    assert tree.path([7, 0]) == [0, 2, 3]
    assert tree.path([0]) is None
    assert tree.ancestors()[3] == [True, False, True, True, False]


@pytest.mark.parametrize(
    ("needs", "tree", "said"),
    [
        ({}, {"name": "dynamic", "nodes": NODES}, "the server verifies 6"),
        ({"taps": (1, 2)}, TREES["chain"], "formats of their own"),
        ({"lower_layers": 1}, TREES["chain"], "does not lend"),
    ],
)
def test_what_a_server_does_not_give_is_refused(
    needs: dict[str, Any], tree: dict[str, Any], said: str
) -> None:
    made = drafter()
    for name, value in needs.items():
        setattr(made, name, value)
    with pytest.raises(FalconLabError, match=said):
        served(made, tree)


def test_the_host_is_the_target_s_tables() -> None:
    tokens, features = torch.arange(12), torch.randn(3, host().hidden_size)
    assert torch.equal(host().embed(tokens), target().embed(tokens))
    torch.testing.assert_close(host().head(features), target().head(features))
    assert host().vocab_size == 12
    with pytest.raises(FalconLabError, match="does not lend"):
        host().norm(features)
    gemma = testing.tiny_target("gemma3", vocab=12, layers=2)
    table = gemma.model.get_input_embeddings().weight
    with pytest.raises(FalconLabError, match="plain tables"):
        ServedTarget("gemma", table, table, gemma.model.config, gemma.tokenizer)
