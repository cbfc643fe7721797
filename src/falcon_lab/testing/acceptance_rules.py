"""The check of an acceptance rule.

Shapes: N tree nodes, A accepted draft tokens, P nodes of a padded path, V vocabulary.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Acceptance, BuildContext
from falcon_lab.model.target import Target
from falcon_lab.sampling import Sampling
from falcon_lab.testing.decoding import engine, expect_greedy
from falcon_lab.testing.reference import ReferenceDrafter, TokenTable, expect_distribution
from falcon_lab.testing.targets import tiny_target
from falcon_lab.testing.tested import ComponentUnderTest, Recipe
from falcon_lab.tree import TokenTree, ancestor_matrix

VOCABULARY = 6
ROOT = 1
ROUNDS = 1200
PARENTS = (-1, 0, 0, 1, 1, 2, 3)
"""Of the trees that rules are tried on: two, two and one below the root, and one below that."""


def check_acceptance(rule: Recipe, *, seed: int = 0) -> None:
    """Check that an acceptance rule does what its kind requires.

    - What it accepts is a path of the tree from the root, and a token of the vocabulary follows;
      it changes nothing that it is given, and draws from the generator alone. A temperature that
      it is not for is refused with a ``FalconLabError``.
    - ``accept_padded``, where there is one, decides the same.
    - One that calls itself ``lossless``: greedily, the longest path that the target would have
      written, and the target's token after it; sampling, the target's own distribution, for trees
      of chosen candidates (whose ``log_q`` must not count), of sampled ones, and of both, unless
      it refuses such with a ``FalconLabError``.

    Args:
        rule: a YAML node, or what builds a rule from a ``BuildContext``.
        seed: of everything random.

    Raises:
        ContractError: it does not.
    """
    tested = ComponentUnderTest("acceptance_rule", rule, seed)
    target = tiny_target(vocab=12, positions=48)
    made = tested.build(BuildContext(target, 1))
    tested.expect(
        isinstance(getattr(made, "lossless", None), bool),
        "lossless",
        expected="True or False",
        found=repr(getattr(made, "lossless", None)),
        fix="say whether the output follows the target's own distribution",
    )
    fitting = []
    for temperature in (0.0, 1.0):
        with tested.checking(f"paths at temperature {temperature:g}"):
            if _fits(made, temperature):
                fitting.append(temperature)
                check_paths(tested, made, temperature)
    tested.expect(
        fitting,
        "temperatures",
        expected="0 or 1 at the least",
        found="both refused",
        fix="refuse only what the rule is not for",
    )
    if not made.lossless:
        return
    if 0.0 in fitting:
        with tested.checking("greedy acceptance"):
            check_greedy(tested, made)
            check_decoding(tested, target)
    if 1.0 in fitting:
        proposals = ["deterministic", "sampled"]
        proposals += ["mixed"] if _fits(made, 1.0, "mixed") else []
        for proposal in proposals:
            with tested.checking(f"the distribution for {proposal} trees"):
                check_distribution(tested, made, proposal)


def _fits(rule: Any, temperature: float, proposal: str = "deterministic") -> bool:
    generator = torch.Generator().manual_seed(0)
    tree = random_tree(generator, proposal)
    try:
        rule(tree, torch.zeros(tree.nodes, VOCABULARY), Sampling(temperature), generator)
    except FalconLabError:
        return False
    return True


def random_tree(
    generator: torch.Generator, proposal: str, q: Tensor | None = None, nodes: int = len(PARENTS)
) -> TokenTree:
    """Make a tree of the first ``nodes`` of ``PARENTS``.

    Siblings are drawn from ``q``, ``[7, V]``, of their parent without replacement. Chosen ones
    carry the same ``log_q``, which must not count. In a mixed tree the second sibling is chosen.
    """
    if q is None:
        q = torch.randn(len(PARENTS), VOCABULARY, generator=generator).softmax(-1)
    parents = torch.tensor(PARENTS[:nodes])
    tokens, log_q, depth = [ROOT], [0.0], [0]
    drawn = torch.multinomial(q, 2, generator=generator).tolist()
    for node, parent in enumerate(PARENTS[1:nodes], start=1):
        rank = PARENTS[:node].count(parent)
        token = drawn[parent][rank]
        if rank and proposal == "mixed":
            token = next(each for each in range(parent, VOCABULARY) if each != drawn[parent][0])
        tokens.append(token)
        log_q.append(float(q[parent, tokens[-1]].log()))
        depth.append(depth[parent] + 1)
    tree = torch.tensor(tokens), parents, torch.tensor(depth), ancestor_matrix(parents)
    if proposal == "deterministic":
        return TokenTree(*tree, "deterministic", torch.tensor(log_q))
    rows = parents.clone()
    if proposal == "sampled":
        return TokenTree(*tree, "sampled", torch.tensor(log_q), q, rows)
    chosen = [node for node in range(nodes) if PARENTS[:node].count(PARENTS[node])]
    rows[chosen] = -1
    return TokenTree(*tree, "mixed", torch.tensor(log_q), q, rows)


def check_paths(tested: ComponentUnderTest, rule: Any, temperature: float) -> None:
    """Check paths, tokens and reproducibility for many trees, down to the root alone."""
    sampling = Sampling(temperature)
    for number in range(60):
        draws = tested.generator(70 + number)
        proposal = "sampled" if temperature and number % 2 else "deterministic"
        tree = with_routes(random_tree(draws, proposal, nodes=1 + number % len(PARENTS)))
        table = TokenTable(VOCABULARY, draws)
        logits = table.logits(tree)
        before = copy.deepcopy((tree, logits))
        first = rule(tree, logits, sampling, tested.generator(200 + number))
        _check_path(tested, tree, first)
        tested.expect(
            torch.equal(logits, before[1])
            and all(
                torch.equal(getattr(tree, name), getattr(before[0], name))
                for name in ("tokens", "parents", "depth", "log_q")
            ),
            "the tree and the logits",
            expected="left as they are",
            found="changed in place",
            fix="clone what you want to change",
        )
        again = rule(tree, logits, sampling, tested.generator(200 + number))
        tested.expect(
            _same(first, again),
            "the same round with the same generator",
            expected=f"path {first.path.tolist()}, then token {int(first.next_token)}",
            found=f"path {again.path.tolist()}, then token {int(again.next_token)}",
            fix="draw from the generator that is given, never from torch's global one",
        )
        _check_padded(tested, rule, tree, logits, sampling, number, first)


def with_routes(tree: TokenTree) -> TokenTree:
    """Return the tree as one whose shape is known ahead of time."""
    deepest = int(tree.depth.max())
    rows = []
    for node in range(tree.nodes):
        path = tree.ancestors[node].nonzero().flatten().tolist()
        rows.append(path + [node] * (deepest + 1 - len(path)))
    parts = {name: getattr(tree, name) for name in tree.__dataclass_fields__}
    return TokenTree(**parts | {"routes": torch.tensor(rows)})


def _same(ours: Acceptance, other: Acceptance) -> bool:
    return ours.path.tolist() == other.path.tolist() and int(ours.next_token) == int(
        other.next_token
    )


def _check_path(tested: ComponentUnderTest, tree: TokenTree, found: Acceptance) -> None:
    path, parents = found.path.tolist(), tree.parents.tolist()
    right = path[:1] == [0] and all(
        0 < node < tree.nodes and parents[node] == before for before, node in pairwise(path)
    )
    tested.expect(
        found.path.dtype == torch.long and right,
        f"the accepted path in a tree with parents {parents}",
        expected="nodes from the root (0) down, each the child of the one before, as long",
        found=f"{path} ({found.path.dtype})",
        fix="give the whole path, the root counted",
    )
    token = found.next_token
    tested.expect(
        token.shape == () and token.dtype == torch.long and 0 <= int(token) < VOCABULARY,
        "next_token",
        expected=f"a 0-d long, 0 to {VOCABULARY - 1}",
        found=f"{token.tolist()} ({token.dtype}, {list(token.shape)})",
        fix="give the correction or bonus token that follows the path",
    )


def _check_padded(
    tested: ComponentUnderTest,
    rule: Any,
    tree: TokenTree,
    logits: Tensor,
    sampling: Sampling,
    number: int,
    expected: Acceptance,
) -> None:
    padded = rule.accept_padded(tree, logits, sampling, tested.generator(200 + number))
    if padded is None:
        return
    path = padded.path.tolist()
    kept = expected.path.tolist()
    filled = kept + kept[-1:] * (len(path) - len(kept))
    tested.expect(
        path == filled and int(padded.next_token) == int(expected.next_token),
        "accept_padded",
        expected=f"{filled}, then {int(expected.next_token)}, as the rule itself decides",
        found=f"{path}, then {int(padded.next_token)}",
        fix="repeat the path's last node to fill up, or return None",
    )


def check_greedy(tested: ComponentUnderTest, rule: Any) -> None:
    """Check that the longest path of the target's own choices is accepted."""
    for number in range(80):
        draws = tested.generator(400 + number)
        tree = random_tree(draws, "deterministic")
        logits = torch.randn(tree.nodes, VOCABULARY, generator=draws)
        for node in range(1, tree.nodes):  # the target often agrees
            if float(torch.rand((), generator=draws)) < 0.6:
                logits[PARENTS[node], tree.tokens[node]] += 5
        path = [0]
        while True:
            best = int(logits[path[-1]].argmax())
            below = [n for n in range(tree.nodes) if PARENTS[n] == path[-1]]
            child = [n for n in below if int(tree.tokens[n]) == best]
            if not child:
                break
            path.append(child[0])
        found = rule(tree, logits, Sampling(), tested.generator(number))
        tested.expect(
            found.path.tolist() == path and int(found.next_token) == best,
            "a greedy round",
            expected=f"path {path}, then token {best}",
            found=f"path {found.path.tolist()}, then token {int(found.next_token)}",
            fix="accept a node when it is the target's most likely token after its parent, as far "
            "as that goes, or call the rule lossy (lossless = False)",
        )


def check_distribution(tested: ComponentUnderTest, rule: Any, proposal: str) -> None:
    """Check the distribution of two tokens after the root, for a fixed tree or one drawn anew."""
    sampling = Sampling(1.0)
    for number in range(2):
        draws = tested.generator(600 + number)
        table = TokenTable(VOCABULARY, draws)
        q = torch.randn(len(PARENTS), VOCABULARY, generator=draws).softmax(-1)
        tree, texts = random_tree(draws, proposal, q), []
        for _ in range(ROUNDS):
            if proposal != "deterministic":
                tree = random_tree(draws, proposal, q)
            found = rule(tree, table.logits(tree), sampling, draws)
            texts.append(table.text(tree, found, sampling, draws))
        expect_distribution(
            tested,
            f"the output for {proposal} trees",
            torch.tensor(texts),
            table.exact(ROOT, sampling),
            "see falcon_lab/acceptance.py for rules that keep it, or call the rule lossy "
            "(lossless = False); the drafter's probabilities must not count where candidates were "
            "chosen",
        )


def check_decoding(tested: ComponentUnderTest, target: Target) -> None:
    """Check greedy text that is decoded with the rule."""
    drafter = ReferenceDrafter(target.vocab_size, 2)
    rule = tested.build(BuildContext.of(target, drafter))
    made = engine(target, drafter, rule=rule, components=tested.components)
    expect_greedy(tested, target, made, "the rule")
