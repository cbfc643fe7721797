from __future__ import annotations

import math
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from falcon_lab_gsd import GsdConfig
from falcon_lab_gsd.__main__ import main
from falcon_lab_gsd.graph import GsdTree
from gsd_cases import ALL, FAMILIES, FOLDER, Markov, drafter, engine, read_whole, target

from falcon_lab import testing
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Budget, BuildContext, DraftOutput, Frontier, RoundContext
from falcon_lab.sampling import Sampling
from falcon_lab.testing import ContractError
from falcon_lab.testing.reference import ReferenceLogits, Tokens, grow
from falcon_lab.tree import TokenTree

PROMPTS = [[5], [3, 1, 4, 1, 5, 9]]
V, ROOT = 12, 7
Q = dict[Tokens, float]


def test_the_distribution_is_as_users_expect_one() -> None:
    testing.check_distribution(FOLDER)


# --- the graph -------------------------------------------------------------------------------


def built(context: BuildContext, **options: Any) -> GsdTree:
    return GsdTree(GsdConfig(**options), context)


def drawn(source: ReferenceLogits, **options: Any) -> tuple[GsdTree, TokenTree, int]:
    """A round: the builder, its tree, and the blocks that were expanded."""
    made = built(BuildContext(target(), 1), **options)
    context = RoundContext(torch.tensor(ROOT), Budget(), Sampling(), torch.Generator())
    done = grow(made, source, context)
    assert done.tree is not None
    return made, done.tree, sum(map(len, done.expanded))


def nodes_of(tree: TokenTree) -> Q:
    paths: list[Tokens] = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths[1:], tree.log_q.tolist()[1:], strict=True))


def brute_force(source: ReferenceLogits, config: GsdConfig, path: Tokens = ()) -> tuple[Q, int]:
    """The tree of the same candidates, way by way, and how many blocks it expands."""
    found: Q = {}
    row = source.logits(path)[0].log_softmax(-1)
    best, tokens = row.topk(config.width)
    blocks = 1
    for token, own in zip(tokens.tolist(), best.tolist(), strict=True):
        if math.exp(own) < config.sibling_threshold * math.exp(float(best[0])):
            continue
        found[(*path, token)] = own
        if math.exp(own) >= config.prob_threshold and len(path) + 1 < config.depth:
            below, more = brute_force(source, config, (*path, token))
            found |= below
            blocks += more
    return found, blocks


OPTIONS = [
    {"depth": 5, "width": 3, **ALL},
    {"depth": 6, "width": 4, "prob_threshold": 0.08, "sibling_threshold": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_unrolled_graph_is_the_tree_of_the_same_candidates(
    options: dict[str, Any], seed: int
) -> None:
    """Of a drafter that the newest two tokens decide, R = 1 loses nothing."""
    source = Markov(V, 1, seed)
    config = GsdConfig(nodes=3000, repeat_threshold=1, **options)
    expected, blocks = brute_force(source, config)
    made, tree, expanded = drawn(source, nodes=3000, repeat_threshold=1, **options)
    assert nodes_of(tree) == pytest.approx(expected, abs=1e-5)
    assert expanded < blocks
    assert made.work.blocks == expanded
    assert made.work.saved == blocks - expanded
    _, plain, all_of_them = drawn(source, nodes=3000, repeat_threshold=None, **options)
    assert nodes_of(plain) == pytest.approx(expected, abs=1e-5)
    assert all_of_them == blocks


def test_where_room_ends_the_likeliest_nodes_stay() -> None:
    source, options = Markov(V, 1, 3), {"depth": 4, "width": 4, **ALL}
    expected, _ = brute_force(source, GsdConfig(**options))
    sums = {
        path: sum(expected[path[:depth]] for depth in range(1, len(path) + 1)) for path in expected
    }
    best = sorted(sums, key=lambda path: -sums[path])[:30]
    # A pass takes no more blocks than the tree has nodes, and 64 are those of the deepest one.
    _, tree, _ = drawn(source, nodes=64, **options)
    assert set(nodes_of(tree)) >= set(best)
    made = built(BuildContext(target(), 1), nodes=30, **options)
    assert made.max_nodes == 31


def test_two_branches_that_say_the_same_share_a_node_by_hand() -> None:
    """The root proposes 1 and 2, each of these 3, and 3 proposes 4.

    R = 0 reads 3 once; R = 1 finds that 3 4 is there, where nothing was to be read any more.
    """
    says = {7: {1: 0.6, 2: 0.4}, 1: {3: 1.0}, 2: {3: 1.0}, 3: {4: 1.0}}

    class Says(ReferenceLogits):
        def logits(self, node: Tokens) -> torch.Tensor:
            row = torch.full((1, V), -torch.inf)
            for token, share in says.get((7, *node)[-1], {}).items():
                row[0, token] = math.log(share)
            return row

    for threshold, counts in ((0, (4, 2, 1)), (1, (5, 1, 0)), (None, (5, 0, 0))):
        made, tree, expanded = drawn(
            Says(V, 1), depth=3, width=2, repeat_threshold=threshold, **ALL
        )
        assert set(nodes_of(tree)) == {(1,), (2,), (1, 3), (2, 3), (1, 3, 4), (2, 3, 4)}
        assert (expanded, made.work.copies, made.work.saved) == counts


def test_a_way_may_be_longer_than_the_passes() -> None:
    """1 and 2 take turns for ever: two passes know all that follows."""

    class Turns(ReferenceLogits):
        def logits(self, node: Tokens) -> torch.Tensor:
            row = torch.full((1, V), -torch.inf)
            row[0, {7: [1, 2], 1: [2], 2: [1]}[(7, *node)[-1]]] = 0.0
            return row

    made, tree, expanded = drawn(Turns(V, 1), depth=6, width=2, repeat_threshold=0, **ALL)
    assert set(nodes_of(tree)) == {
        (1, 2, 1, 2, 1, 2)[begin : begin + length] for begin in (0, 1) for length in range(1, 6)
    } | {(1, 2) * 3, (2, 1) * 3}
    assert (made.work.passes, expanded) == (2, 3)


def test_the_text_before_the_root_counts_too() -> None:
    made = built(BuildContext(target(), 1), repeat_threshold=2, depth=2, width=2, **ALL)
    for text in ([], [4, 4]):
        sampling = Sampling(), torch.Generator()
        given = RoundContext(torch.tensor(4), Budget(), *sampling, lambda n, t=text: [*t, 4][-n:])
        made.start(given)
        logits = torch.full((1, 1, V), -torch.inf)
        logits[0, 0, 4:6] = torch.tensor([1.0, 0.0])
        made.grow(DraftOutput(logits))
        made.grow(DraftOutput(logits.expand(2, -1, -1)))
        made.finish()
        # Behind 4 4 the first pass has found 4 and 5, and so has the second, behind 4 4 4.
        assert len(made.copies) == len(text) // 2


def test_a_drafter_of_several_tokens_a_pass_is_refused() -> None:
    with pytest.raises(FalconLabError, match="one token a pass"):
        built(BuildContext(target(), 2))


# --- the contract ----------------------------------------------------------------------------


def test_it_keeps_the_promises_of_a_tree_builder() -> None:
    options = {"nodes": 30, "depth": 4, "repeat_threshold": 0, **ALL}
    testing.check_tree_builder(lambda context: built(context, **options), blocks=(1,))


class Strict(GsdTree):
    """Merges, and says that it does not."""

    def start(self, context: RoundContext) -> Frontier | None:
        self.shared_suffix = 2
        return super().start(context)

    def finish(self) -> TokenTree:
        tree = super().finish()
        self.shared_suffix = None
        return tree


class Loose(GsdTree):
    """Merges where one token agrees, and says that two do."""

    def start(self, context: RoundContext) -> Frontier | None:
        self.shared_suffix = 1
        return super().start(context)

    def finish(self) -> TokenTree:
        tree = super().finish()
        self.shared_suffix = 2
        return tree


class Swapped(GsdTree):
    """Gives copies the candidates of another node."""

    def finish(self) -> TokenTree:
        for node in self._graph:
            merged = [edge for edge in node.edges if edge.merged]
            for edge in merged:
                other = 1 + edge.node % (len(self._graph) - 1)
                node.edges[node.edges.index(edge)] = edge._replace(node=other)
        return super().finish()


@pytest.mark.parametrize("planted", [Strict, Loose, Swapped])
def test_unrolled_nodes_of_a_wrong_source_are_found(planted: type[GsdTree]) -> None:
    config = GsdConfig(nodes=30, depth=4, repeat_threshold=1, **ALL)
    with pytest.raises(ContractError, match=r"the node at|siblings|tree\.depth"):
        testing.check_tree_builder(lambda context: planted(config, context), blocks=(1,))


# --- decoding --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_target_s_own_and_what_crosses_a_merge_is_read_again(
    family: str,
) -> None:
    """After every round the draft model says what it says of the whole text without a cache."""
    model = target(family)
    draft = drafter(model)
    tree = {"name": "gsd", "nodes": 40, "depth": 4, "repeat_threshold": 0, **ALL}
    made = engine(model, draft, tree=tree)
    builder: Any = made.tree_builder
    crossed = 0
    for prompt, temperature in product(PROMPTS, (0.0, 1.0)):
        text = list(prompt)

        def check(
            added: list[int],
            accepted: int,
            tree: TokenTree | None,
            found: Any,
            text: list[int] = text,
        ) -> None:
            nonlocal crossed
            text.extend(added)
            if tree is None:
                return
            crossed += any(node in builder.copies for node in found.path.tolist()[: accepted + 1])
            ours = deepcopy(draft).draft(Frontier.root(torch.device("cpu"))).logits[0, 0]
            torch.testing.assert_close(ours, read_whole(draft, text), rtol=1e-4, atol=1e-4)

        ours = testing.write(made, prompt, 16, on_round=check, temperature=temperature)
        assert ours.tokens == testing.plain_text(model, prompt, 16, temperature=temperature)
    assert crossed > 0
    assert builder.work.saved > 0


def test_a_part_of_the_target_may_draft_too() -> None:
    model = target()
    tree = {"name": "gsd", "nodes": 20, "depth": 4, "repeat_threshold": 0, **ALL}
    made = engine(model, drafter(model, "selfspec", layers=2), tree=tree)
    rounds = testing.lossless_rounds(made, PROMPTS, 24)
    assert testing.accepted(rounds) > 0


def test_sampled_output_follows_the_target_s_distribution() -> None:
    model = testing.tiny_target(vocab=5, layers=2)
    tree = {"name": "gsd", "nodes": 20, "depth": 3, "repeat_threshold": 0, **ALL}
    made = engine(model, drafter(model), tree=tree)
    generator = torch.Generator().manual_seed(5)
    assert testing.fit(made, [3, 1, 4], samples=400, generator=generator, temperature=0.9) > 0.01
    builder: Any = made.tree_builder
    assert builder.work.copies > 0


def test_the_command_prints_what_merging_saves(tmp_path: Path) -> None:
    model = target()
    model.model.save_pretrained(tmp_path / "target")
    model.tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text("a b c d e f " * 4, "utf-8")
    words = ["saving", str(tmp_path / "target"), "--corpus", str(tmp_path / "texts")]
    words += ["--drafter", "{name: selfspec, layers: 1}", "--tokens", "12", "--prompt-tokens", "8"]
    words += ["--set", "prob_threshold=0", "--set", "depth=3", "--set", "nodes=12"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert {"R", "never", "0", "1", "2"} <= set(rows)
    assert float(rows["never"][6]) == 0
    assert float(rows["0"][6]) > 0
    wrong = CliRunner().invoke(main, [*words, "--set", "nodes=0"])
    assert wrong.exit_code == 2
    assert "tree.nodes: is 0" in wrong.stderr
