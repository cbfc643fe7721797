"""The checks of a drafter that runs the target's layers, on the target's own KV cache.

Shapes: F frontier blocks, k block, P draft tokens that a round has appended before a pass.
"""

from __future__ import annotations

from typing import Any

from falcon_lab.interfaces import Frontier
from falcon_lab.testing.drafter_case import Appended, Case, DraftedSequence, expanded
from falcon_lab.tree import TokenTree, listed_tree

ROWS = 15
PASSES = 4
"""Of a round."""


def check_what_is_appended(case: Case) -> None:
    """Check masks and positions of the draft tokens that the target's layers read."""
    drafter = case.fresh()
    drafted = DraftedSequence(drafter, case.text(drafter, ROWS))
    appended = drafted.layers.appended
    for seed, new in ((40, 5), (41, 2), (42, 1)):
        before = len(appended)
        drafted.observe(new)
        case.tested.expect(
            len(appended) == before,
            "passes through the target's layers outside of a round",
            expected="none: the target itself has read what is observed",
            found=len(appended) - before,
            fix="run the layers in draft() alone; what observe() or reset() appended would stay "
            "among the draft tokens of the next round",
        )
        drafted.round(case.tested.generator(seed), PASSES)
        _check_round(case, appended[before:])


def _check_round(case: Case, appended: list[Appended]) -> None:
    depths: list[int] = []
    for number, one in enumerate(appended, start=1):
        drafts, count = one.drafts, len(one.drafts.tokens)
        where = f"pass {number} through the target's layers in a round"
        shape = None if drafts.mask is None else list(drafts.mask.shape)
        case.tested.expect(
            shape in (None, [count, one.before + count]),
            f"the shape of DraftTokens.mask in {where}",
            expected=f"[n, P + n] = [{count}, {one.before + count}]",
            found=shape,
            fix="a mask is about the draft tokens of this round alone; those of the rounds before "
            "are gone from the cache",
        )
        rows = None if drafts.mask is None else drafts.mask.tolist()
        for place, (token, depth) in enumerate(
            zip(drafts.tokens.tolist(), drafts.depth.tolist(), strict=True)
        ):
            seen = [at for at in range(len(depths)) if rows is None or rows[place][at]]
            expected = depths[seen[-1]] + 1 if seen else 0
            case.tested.expect(
                depth == expected,
                f"DraftTokens.depth in {where}",
                expected=f"{expected}, behind the newest draft token that it attends to"
                if seen
                else "0: it attends to no draft token, so that it is the newest committed one",
                found=depth,
                fix="positions count from the newest committed token, whose depth is 0",
            )
            case.tested.expect(
                bool(seen) or token == one.newest,
                f"a token at depth 0 in {where}",
                expected=f"{one.newest}, the newest committed one",
                found=token,
                fix="a round begins with the last token that observe() was given",
            )
            depths.append(depth)


def check_lower_layers(case: Case) -> None:
    """Check that verification may go on where the drafter's passes have ended."""
    drafter = case.fresh()
    if not drafter.lower_layers:
        return
    drafted = DraftedSequence(drafter, case.text(drafter, ROWS))
    for seed, new in ((43, 4), (44, 3)):
        drafted.observe(new)
        tree = _drafted_tree(drafted, case.tested.generator(seed))
        before = len(drafted.layers.appended)
        ours = drafted.layers.verify(tree)
        again = sum(len(one.drafts.tokens) for one in drafted.layers.appended[before:])
        case.tested.expect(
            again < tree.nodes,
            f"nodes that its passes through lower_layers={drafter.lower_layers} have read",
            expected="some, with their keys and values in each of these layers",
            found=f"none of {tree.nodes}",
            fix="run LayerPlan(last=lower_layers) over draft tokens, each attending to its "
            "ancestors and itself, or leave lower_layers at 0",
        )
        cache = case.target.new_cache(drafted.known + tree.nodes)
        case.target.prefill(drafted.text.tokens[: drafted.known], cache)
        case.same(
            "a verification that goes on where its passes have ended",
            ours,
            case.target.verify(tree, cache).logits,
            "a draft token attends to the root, its ancestors and itself, at its own depth: its "
            "states and keys are those that the target would compute",
        )


def _drafted_tree(drafted: DraftedSequence, generator: Any) -> TokenTree:
    """Draft a round and return all that it expanded as a tree, with a node that was not read."""
    output, tokens, parents = drafted.draft(), list[int](), list[int]()
    ends, most = [0], drafted.drafter.max_passes or PASSES
    for _ in range(min(PASSES, most) - 1):
        frontier = expanded(output, drafted.drafter.block, generator)
        if frontier is None:
            break
        output = drafted.draft(frontier)
        ends = _append(frontier, ends, tokens, parents)
    tokens.append(1)
    parents.append(ends[-1])
    root = drafted.text.tokens[drafted.known]
    return listed_tree(root, tokens, parents, [0.0] * len(tokens))


def _append(
    frontier: Frontier, ends: list[int], tokens: list[int], parents: list[int]
) -> list[int]:
    """Append the nodes of a frontier below the last nodes of the blocks before; return its own."""
    found = []
    for block, parent in zip(frontier.tokens.tolist(), frontier.parents.tolist(), strict=True):
        above = ends[parent]
        for token in block:
            tokens.append(token)
            parents.append(above)
            above = len(tokens)
        found.append(above)
    return found


CHECKS: list[tuple[str, Any]] = [
    ("what it appends to the target's cache", check_what_is_appended),
    ("that verification goes on from its layers", check_lower_layers),
]
