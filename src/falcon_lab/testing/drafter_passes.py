"""The checks of every drafter while it drafts.

Shapes: F frontier blocks, k block, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from falcon_lab.interfaces import DraftOutput, Frontier, Observation
from falcon_lab.testing.compiling import Pretend, Repeating
from falcon_lab.testing.drafter_case import Case, DraftedSequence, TextLayers, expanded

ROWS = 17


def check_declarations(case: Case) -> None:
    """Check the attributes and the weights of the drafter."""
    tested, drafter = case.tested, case.tested.build(case.context)
    abstract = type(drafter).__abstractmethods__
    missing = [
        name
        for name in ("block", "needs", "reset", "draft", "observe")
        if name in abstract or not hasattr(drafter, name)
    ]
    tested.expect(
        not missing,
        "the members of a Drafter",
        expected="block, needs, reset, draft and observe",
        found=f"no {', '.join(missing)}",
        fix="see falcon_lab.interfaces.Drafter",
    )
    block, needs = drafter.block, drafter.needs
    tested.expect(
        isinstance(block, int) and block >= 1,
        "block",
        expected="tokens of a pass, at least 1",
        found=repr(block),
        fix="set it before the first pass",
    )
    tested.expect(
        isinstance(needs, frozenset) and needs <= {"features"},
        "needs",
        expected="frozenset() or frozenset({'features'})",
        found=repr(needs),
        fix="layers in the middle of the target are named by the attribute taps",
    )
    most = drafter.max_passes
    tested.expect(
        most is None or (isinstance(most, int) and most >= 1),
        "max_passes",
        expected="None, or at least 1",
        found=repr(most),
        fix="leave it out if a round may have any number of passes",
    )
    case.target.tapped(drafter.taps)  # says itself what is wrong
    if not isinstance(drafter, nn.Module):
        return
    places = {weight.data_ptr() for weight in case.target.model.parameters()}
    own = [name for name, weight in drafter.state_dict().items() if weight.data_ptr() in places]
    tested.expect(
        not own,
        "its weights",
        expected="none of the target's",
        found=f"the target's as {', '.join(own)}",
        fix="use host.embed and host.head, and keep the host out of the module's own modules",
    )


def check_shapes(case: Case) -> None:
    """Check shapes and values of every pass."""
    drafter = case.fresh()
    text = case.text(drafter, ROWS)
    drafted = DraftedSequence(drafter, text)
    drafted.observe(ROWS - 2)
    generator = case.tested.generator(3)
    frontier: Frontier | None = Frontier.root(text.tokens.device)
    most = drafter.max_passes or 3
    for number in range(min(3, most)):
        if frontier is None:
            return
        output = drafted.draft(frontier)
        _check_output(case, output, frontier, drafter.block, f"pass {number + 1} of a round")
        frontier = expanded(output, drafter.block, generator)


def _check_output(
    case: Case, output: DraftOutput, frontier: Frontier, block: int, where: str
) -> None:
    tested, width = case.tested, case.width
    logits, blocks = output.logits, frontier.tokens.shape[0]
    shape = list(logits.shape)
    tested.expect(
        logits.dim() == 3 and (shape[0], shape[2]) == (blocks, width) and shape[1] <= block,
        f"the shape of DraftOutput.logits in {where}",
        expected=f"[F, rows, V] = [{blocks}, at most {block}, {width}]",
        found=shape,
        fix="give every frontier block up to k rows of logits over the target's vocabulary, or "
        "the drafter's own",
    )
    ids = [
        None if each is None else each.ids.tolist() for each in (case.vocabulary, output.vocabulary)
    ]
    tested.expect(
        ids[0] == ids[1],
        f"DraftOutput.vocabulary in {where}",
        expected="the drafter's own, None where it can propose all tokens"
        if ids[0] is None
        else ids[0],
        found=ids[1],
        fix="hand draft_vocabulary on with every output, so that a column becomes its token",
    )
    tested.expect(
        not bool(logits.isnan().any() | (logits == torch.inf).any()),
        f"DraftOutput.logits in {where}",
        expected="finite values, and -inf for what is not proposed",
        found="nan or inf",
        fix="look for a division by zero, or a softmax over nothing",
    )
    tested.expect(
        not output.all_proposed or bool(logits.isfinite().all()),
        f"DraftOutput.all_proposed in {where}",
        expected="False where a token is not proposed (-inf)",
        found="True",
        fix="leave it out unless every token is always proposed",
    )
    if output.features is not None:
        tested.expect(
            output.features.shape[:2] == logits.shape[:2],
            f"the shape of DraftOutput.features in {where}",
            expected=f"[{blocks}, {shape[1]}, H]",
            found=list(output.features.shape),
            fix="one feature a row of logits",
        )


def check_that_inputs_stay(case: Case) -> None:
    """Check that nothing that it is given is changed in place."""
    drafter = case.fresh()
    text = case.text(drafter, ROWS)
    weights = [weight.clone() for weight in case.target.model.parameters()]
    first, layers = text.tokens[0].clone(), TextLayers(text, drafter)
    drafter.attach(layers)
    drafter.reset(first)
    seen = text.observation(drafter, 0, ROWS)
    before = copy.deepcopy(seen)
    layers.commit(ROWS)
    drafter.observe(seen)
    output = drafter.draft(Frontier.root(first.device))
    frontier = None
    if drafter.max_passes != 1:
        frontier = expanded(output, drafter.block, case.tested.generator(4))
    asked = copy.deepcopy(frontier)
    if frontier is not None:
        drafter.draft(frontier)
    changed = [
        name
        for name, ours, theirs in (
            ("the first token", [first], [text.tokens[0]]),
            ("the observation", _tensors(seen), _tensors(before)),
            ("the frontier", _tensors(frontier), _tensors(asked)),
            ("the target's weights", list(case.target.model.parameters()), weights),
        )
        if not all(map(torch.equal, ours, theirs))
    ]
    case.tested.expect(
        not changed,
        "what it is given",
        expected="left as it is",
        found=f"{' and '.join(changed)} changed in place",
        fix="clone what you want to change",
    )


def _tensors(value: Observation | Frontier | None) -> list[Tensor]:
    fields = () if value is None else value.__dataclass_fields__
    return [part for name in fields if isinstance(part := getattr(value, name), Tensor)]


def check_that_drafts_leave_no_trace(case: Case) -> None:
    """Check that what was drafted is dropped by the next observation."""
    ends = []
    for rounds in ((5, 6), (7, 8)):  # seeds of what is drafted in between
        drafter = case.fresh()
        drafted = DraftedSequence(drafter, case.text(drafter, ROWS))
        drafted.observe(9)
        for seed, new in zip(rounds, (1, drafter.block + 1), strict=True):
            drafted.round(case.tested.generator(seed))
            drafted.observe(min(new, ROWS - drafted.known))
        ends.append(drafted.round(case.tested.generator(9)))
    _same_rounds(
        case,
        "drafts after rounds that drafted other tokens",
        ends,
        "drop in observe() whatever draft() wrote: truncate caches to the committed tokens, and "
        "forget the states of branches",
    )


def check_that_drafting_is_repeatable(case: Case) -> None:
    """Check that a text gives the same drafts, whatever torch's global generator does."""
    ends = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            drafter = case.fresh()
            drafted = DraftedSequence(drafter, case.text(drafter, ROWS))
            drafted.observe(ROWS)
            ends.append(drafted.round(case.tested.generator(10)))
            torch.rand(1)
    _same_rounds(
        case,
        "a round drafted again, for the same text",
        ends,
        "draft() draws nothing at random; is dropout off in eval()?",
    )


def check_that_a_prompt_may_come_in_parts(case: Case) -> None:
    """Check a prompt in parts, as ``Observation.remaining`` announces them."""
    for parts in ([3, 1, 6, 5], [1] * 15, [14, 1]):
        ends = []
        for division in (parts, [15]):
            drafter = case.fresh()
            drafted = DraftedSequence(drafter, case.text(drafter, ROWS))
            for part in division:
                drafted.observe(part, remaining=15 - drafted.known - part)
            first = drafted.round(case.tested.generator(11))
            drafted.observe(2)
            ends.append([*first, *drafted.round(case.tested.generator(12))])
        _same_rounds(
            case,
            f"drafts after a prompt in parts of {parts} tokens",
            ends,
            "an observation with remaining > 0 is a part of one prompt: the drafts after its last "
            "part are those after the whole",
        )


def check_that_tokens_may_come_in_rounds(case: Case) -> None:
    """Check that cached equals uncached: k more positions a round, or all of them at once.

    Only multiples of k, since where the blocks of older tokens lie may follow from the rounds.
    """
    drafter = case.fresh()
    block = drafter.block
    counts = [block + 1, *(block * n for n in (1, 2, 1))]
    ends = []
    for division in (counts, [sum(counts)]):
        drafter = case.fresh()
        drafted = DraftedSequence(drafter, case.text(drafter, sum(counts)))
        for number, part in enumerate(division):
            if number:
                drafted.round(case.tested.generator(13 + number))
            drafted.observe(part)
        ends.append(drafted.round(case.tested.generator(20)))
    _same_rounds(
        case,
        f"drafts after {counts} tokens in as many rounds",
        ends,
        "a cache must hold what computing all tokens anew would give: look at positions, masks and "
        "the tokens that observe() appends",
    )


def check_that_reset_forgets(case: Case) -> None:
    """Check that a second text is drafted for as the first one of a new drafter."""
    ends = []
    for before in (True, False):
        drafter = case.fresh()
        if before:
            other = DraftedSequence(drafter, case.text(drafter, ROWS, number=21))
            other.observe(8)
            other.round(case.tested.generator(22))
            other.observe(3)
            other.observe(2, remaining=4)  # cut short, as by an interrupt
        drafted = DraftedSequence(drafter, case.text(drafter, ROWS))
        drafted.observe(6)
        ends.append(drafted.round(case.tested.generator(23)))
    _same_rounds(
        case,
        "drafts for a second text",
        ends,
        "make every cache, state and memory anew in reset()",
    )


def check_that_branches_are_chains(case: Case) -> None:
    """Check that a block of a tree is drafted for as if its branch were alone, pass after pass.

    From the third pass on the blocks of a tree have parents and ancestors of their own.
    """
    drafter, generator = case.fresh(), case.tested.generator(24)
    drafted = _before_a_round(case, drafter)
    outputs, frontiers = [drafted.draft()], list[Frontier]()
    while len(outputs) < min(4, drafter.max_passes or 4):
        frontier = expanded(outputs[-1], drafter.block, generator)
        if frontier is None:
            break
        frontiers.append(frontier)
        outputs.append(drafted.draft(frontier))
    for chain in _chains(frontiers):
        drafted = _before_a_round(case, drafter)
        drafted.draft()
        for number, place in enumerate(chain):
            one = slice(place, place + 1)
            block = frontiers[number].tokens[one]
            alone = drafted.draft(Frontier(block, torch.zeros(1, dtype=torch.long)))
            case.same(
                f"a block of a frontier of several (pass {number + 2})",
                outputs[number + 1].target_logits[one],
                alone.target_logits,
                "a block continues from the one that its entry of frontier.parents names, and "
                "attends to committed tokens, its ancestors and itself, never its neighbours or "
                "what these come from",
            )


def _before_a_round(case: Case, drafter: Any) -> DraftedSequence:
    drafted = DraftedSequence(drafter, case.text(drafter, ROWS))
    drafted.observe(ROWS - 3)
    return drafted


def _chains(frontiers: Sequence[Frontier]) -> list[list[int]]:
    """Return for every branch the places of its blocks in the frontiers of its passes."""
    ended, growing = list[list[int]](), [list[int]()]
    for frontier in frontiers:
        parents = frontier.parents.tolist()
        ended += [chain for place, chain in enumerate(growing) if place not in parents]
        growing = [[*growing[parent], place] for place, parent in enumerate(parents)]
    return ended + growing


def check_reserved_memory(case: Case) -> None:
    """Check that the bytes it counts grow with the text."""
    drafter = case.fresh()
    tree = case.tested.components.build("tree_builder", {"name": "chain"}, case.of(drafter))
    found = [drafter.kv_bytes(positions, tree) for positions in (1, 10, 40)]
    case.tested.expect(
        all(isinstance(each, int) for each in found) and 0 <= found[0] <= found[1] <= found[2],
        "kv_bytes of 1, 10 and 40 positions",
        expected="whole numbers that do not fall",
        found=found,
        fix="count all positions of the text, and those of a round",
    )


def check_compiled_passes(case: Case) -> None:
    """Check that compiled passes and graphs draft what the modules draft."""

    def quiet(line: str) -> None:
        """Drop the line."""

    if not case.fresh().compiled(quiet, Pretend()).is_compiled:
        return
    for name, recorder in (("compiled passes", None), ("passes replayed as graphs", Repeating())):
        ends = []
        for compiled in (True, False):
            drafter = case.fresh()
            if compiled:
                drafter = drafter.compiled(quiet, Pretend(), recorder)
                drafter.prepare(drafter.block + 1)
            found = []
            for number in (25, 26):  # a second text has_paths what the first one has left
                drafted = DraftedSequence(drafter, case.text(drafter, ROWS, number=number))
                for new in (6, 1, 3, 2, 5):
                    drafted.observe(new)
                    found += drafted.round(case.tested.generator(27))
            ends.append(found)
        _same_rounds(
            case,
            f"drafts through {name}",
            ends,
            "a compiled pass does what the modules do, for every number of tokens: see padding, "
            "positions and masks",
        )


def _same_rounds(case: Case, what: str, rounds: Sequence[Sequence[DraftOutput]], fix: str) -> None:
    ours, expected = rounds
    case.tested.expect(
        len(ours) == len(expected),
        what,
        expected=f"{len(expected)} passes",
        found=f"{len(ours)} passes",
        fix=fix,
    )
    for number, (one, other) in enumerate(zip(ours, expected, strict=True)):
        case.same(f"{what} (pass {number + 1})", one.target_logits, other.target_logits, fix)


CHECKS: list[tuple[str, Any]] = [
    ("the shapes of its passes", check_shapes),
    ("that it leaves its inputs alone", check_that_inputs_stay),
    ("that drafting is repeatable", check_that_drafting_is_repeatable),
    ("that drafts leave no trace", check_that_drafts_leave_no_trace),
    ("that a prompt may come in parts", check_that_a_prompt_may_come_in_parts),
    ("that tokens may come in rounds", check_that_tokens_may_come_in_rounds),
    ("that reset forgets", check_that_reset_forgets),
    ("that branches are chains", check_that_branches_are_chains),
    ("the memory that it reserves", check_reserved_memory),
    ("that compiled passes say the same", check_compiled_passes),
]
