"""The drafting side against an oracle without any cache, which runs each branch alone."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_cases import HIDDEN, VOCABULARY, drafter, rows
from falcon_lab.drafters import head_drafting
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import DraftOutput, Frontier, Observation
from tiny_models import POSITIONS

ROOT = Frontier.root(torch.device("cpu"))
Path = list[tuple[Tensor, Tensor]]  # blocks from the root: tokens [k], features [k, H]


class Oracle:
    """Keeps no tensors but the inputs; recomputes everything from the first row on.

    ``horizon[i]`` is the newest row that row i saw when it was last computed.
    """

    def __init__(self, made: FalconDrafter) -> None:
        self.made, self.k = made, made.block
        self.tokens = torch.empty(0, dtype=torch.long)
        self.features = torch.empty(0, HIDDEN, dtype=torch.float64)
        self.horizon: list[int] = []

    def observe(self, tokens: Tensor, features: Tensor) -> None:
        self.tokens = torch.cat([self.tokens, tokens])
        self.features = torch.cat([self.features, features])

    def start_round(self) -> None:
        """Rows of the window are computed again: the new ones, and the last k."""
        old, new, k = len(self.horizon), len(self.tokens), self.k
        if self.made.config.query != "block":
            self.horizon = list(range(new))
        elif self.made.config.phase == "absolute":
            self.horizon = [min(i // k * k + k - 1, new - 1) for i in range(new)]
        else:
            first = max(0, min(old, new - k))
            last = [new - 1 - (new - 1 - i) // k * k for i in range(first, new)]
            self.horizon = self.horizon[:first] + last

    @torch.no_grad()
    def predict(self, path: Path) -> Tensor:
        """Features [k, H] of the block at the end of ``path``."""
        made, k, length = self.made, self.k, len(self.tokens)
        tokens = torch.cat([self.tokens, *[t for t, _ in path]])
        features = torch.cat([self.features, *[f for _, f in path]])
        fused = made.fuse(made.join(tokens, features)[None])[0]
        total = len(tokens)
        newest = made.config.query != "block"
        horizon = list(self.horizon)
        for block in range(len(path)):
            end = length + (block + 1) * k - 1
            horizon += [i if newest else end for i in range(end - k + 1, end + 1)]
        positions = list(range(total))
        if newest:
            assert made.offsets is not None
            newest_row = fused[0, -1]
            asked = [newest_row] * k if made.maps is None else [newest_row @ m for m in made.maps]
            extra = (torch.stack(asked) + made.offsets)[None]
            positions += [total - 1] * k
        else:
            missing = max(0, k - total)
            extra = fused.new_zeros(1, missing, HIDDEN)
            positions += [0] * missing
        everything = torch.cat([fused, extra], dim=1)
        horizon += [everything.shape[1] - 1] * extra.shape[1]
        mask = torch.arange(everything.shape[1]) <= torch.tensor(horizon)[:, None]
        hidden = made.backbone(
            embeddings=everything,
            positions=torch.tensor([positions]).clamp(max=POSITIONS - 1),
            mask=mask[None],
        )[0]
        if extra.shape[1] and not newest:  # the missing rows stand before the others
            return torch.cat([hidden[total:], hidden[:total]])
        return hidden[-k:]


def _features(output: DraftOutput) -> Tensor:
    assert output.features is not None
    return output.features


def _expand(
    made: FalconDrafter, before: DraftOutput, parents: list[int], generator: torch.Generator
) -> tuple[Frontier, DraftOutput]:
    tokens = torch.randint(0, VOCABULARY, (len(parents), made.block), generator=generator)
    frontier = Frontier(tokens, torch.tensor(parents))
    return frontier, made.draft(frontier)


def _play(made: FalconDrafter, oracle: Oracle, lengths: list[int], seed: int = 0) -> None:
    """Rounds of three passes with a branching tree; every block is compared with the oracle."""
    generator = torch.Generator().manual_seed(seed)
    tokens, features = rows(sum(lengths), seed)
    made.reset(tokens[0])
    done = 0
    for new in lengths:
        fresh = slice(done, done + new)
        made.observe(Observation(tokens[fresh], features[fresh]))
        oracle.observe(tokens[fresh], features[fresh])
        done += new
        oracle.start_round()
        root = made.draft(ROOT)
        assert torch.allclose(_features(root)[0], oracle.predict([]), atol=1e-6)
        branches, second = _expand(made, root, [0, 0, 0], generator)
        paths = [[(branches.tokens[b], _features(root)[0])] for b in range(3)]
        for b, path in enumerate(paths):
            assert torch.allclose(_features(second)[b], oracle.predict(path), atol=1e-6)
        leaves, third = _expand(made, second, [2, 0, 2], generator)
        for leaf, parent in enumerate(leaves.parents.tolist()):
            path = [*paths[parent], (leaves.tokens[leaf], _features(second)[parent])]
            assert torch.allclose(_features(third)[leaf], oracle.predict(path), atol=1e-6)
        assert torch.equal(third.logits, made.host.head(_features(third)))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    ("query", "phase"), [("block", "aligned"), ("block", "absolute"), ("newest", "aligned")]
)
@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_cached_rounds_equal_a_computation_from_scratch(
    block: int, query: str, phase: str, layers: int
) -> None:
    made = drafter(block=block, query=query, phase=phase, layers=layers)
    for seed, first in ((0, 9), (1, 1)):
        accepted = torch.randint(
            1, 2 * block + 2, (5,), generator=torch.Generator().manual_seed(seed)
        )
        _play(made, Oracle(made), [first, *accepted.tolist()], seed)


@pytest.mark.parametrize("fuse", ["linear", "lstm_positionwise"])
def test_cached_rounds_equal_a_computation_from_scratch_with_every_fuse(fuse: str) -> None:
    made = drafter(block=2, fuse=fuse)
    _play(made, Oracle(made), [3, 1, 4, 2])


@pytest.mark.parametrize("query", ["block", "newest", "mapped"])
def test_a_chain_equals_the_same_branch_of_a_tree(query: str) -> None:
    made = drafter(block=2, layers=2, query=query)
    tokens, features = rows(7)
    branch = torch.tensor([[5, 6]]), torch.tensor([[7, 8]])
    made.reset(tokens[0])
    made.observe(Observation(tokens, features))
    made.draft(ROOT)
    made.draft(Frontier(branch[0], torch.tensor([0])))
    alone = made.draft(Frontier(branch[1], torch.tensor([0]))).logits[0]
    made.draft(ROOT)
    made.draft(Frontier(torch.cat([torch.tensor([[1, 2]]), branch[0]]), torch.tensor([0, 0])))
    amid = Frontier(torch.cat([torch.tensor([[3, 4]]), branch[1]]), torch.tensor([0, 1]))
    assert torch.allclose(made.draft(amid).logits[1], alone, atol=1e-6)


@pytest.mark.parametrize("query", ["block", "newest", "mapped"])
def test_what_was_drafted_leaves_no_trace(query: str) -> None:
    tokens, features = rows(9)
    outputs = []
    for drafted in (True, False):
        made = drafter(block=2, layers=1, query=query)
        made.reset(tokens[0])
        made.observe(Observation(tokens[:6], features[:6]))
        if drafted:
            root = made.draft(ROOT)
            _expand(made, root, [0, 0], torch.Generator().manual_seed(0))
        made.observe(Observation(tokens[6:8], features[6:8]))
        made.observe(Observation(tokens[8:], features[8:]))  # a round without a draft between
        outputs.append(made.draft(ROOT).logits)
    assert torch.allclose(*outputs, atol=1e-6)


def test_a_new_sequence_knows_nothing_of_the_one_before() -> None:
    made = drafter(block=2)
    tokens, features = rows(8)
    outputs = []
    for before in (3, 0):
        if before:
            made.reset(tokens[0])
            made.observe(Observation(tokens[:before], features[:before]))
            made.draft(ROOT)
        made.reset(tokens[3])
        made.observe(Observation(tokens[3:], features[3:]))
        outputs.append(made.draft(ROOT).logits)
    assert torch.equal(*outputs)


def test_drafting_twice_without_news_gives_the_same() -> None:
    made = drafter(block=3)
    tokens, features = rows(5)
    made.reset(tokens[0])
    made.observe(Observation(tokens, features))
    assert torch.allclose(made.draft(ROOT).logits, made.draft(ROOT).logits, atol=1e-6)


@pytest.mark.parametrize("query", ["block", "newest", "mapped"])
def test_the_cache_grows_with_the_sequence(monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    monkeypatch.setattr(head_drafting, "CAPACITY", 8)
    made = drafter(block=2, layers=2, query=query)
    _play(made, Oracle(made), [3, 5, 9, 20, 2])


@pytest.mark.parametrize(
    ("family", "query"), list(itertools.product(["gpt2", "llama"], ["block", "newest"]))
)
def test_drafts_at_the_end_of_the_context_stay_within_the_host_s_positions(
    family: str, query: str
) -> None:
    made = drafter(family=family, block=4, query=query)
    _play(made, Oracle(made), [POSITIONS - 3, 2])


@pytest.mark.parametrize("block", [2, 3, 4])
def test_a_sequence_shorter_than_a_block_gets_k_predictions(block: int) -> None:
    made = drafter(block=block)
    tokens, features = rows(1)
    made.reset(tokens[0])
    made.observe(Observation(tokens, features))
    output = made.draft(ROOT)
    assert output.logits.shape == (1, block, VOCABULARY)
    assert output.logits.isfinite().all()


def _changed(made: FalconDrafter, row: int) -> Tensor:
    tokens, features = rows(12)
    outputs = []
    for change in (0.0, 1.0):
        moved = features.clone()
        moved[row] += change
        made.reset(tokens[0])
        made.observe(Observation(tokens[:10], moved[:10]))
        made.draft(ROOT)
        made.observe(Observation(tokens[10:], moved[10:]))
        state = made._drafting._sequences[0]
        made.draft(ROOT)
        assert state.recent is not None
        outputs.append(state.recent)
    return (outputs[0] - outputs[1]).abs().sum()


def test_the_lstm_remembers_the_first_row_and_the_positionwise_one_does_not() -> None:
    assert _changed(drafter(block=2, fuse="lstm"), 0) > 0
    assert _changed(drafter(block=2, fuse="lstm_positionwise"), 0) == 0
    assert _changed(drafter(block=2, fuse="linear"), 0) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float32_drafter_drafts_for_a_target_of_another_precision(dtype: torch.dtype) -> None:
    made = drafter(block=2).float()
    made.host.model.to(dtype)
    tokens, features = rows(5)
    made.reset(tokens[0])
    made.observe(Observation(tokens, features.to(dtype)))
    made.draft(ROOT)
    output = made.draft(Frontier(torch.tensor([[1, 2], [3, 4]]), torch.tensor([0, 0])))
    assert output.logits.dtype == dtype
    assert output.logits.isfinite().all()


def test_misuse_is_named() -> None:
    made = drafter(block=2)
    made.reset(torch.tensor(1))
    with pytest.raises(RuntimeError, match="observe"):
        made.draft(ROOT)
    tokens, features = rows(4)
    made.observe(Observation(tokens, None))
    with pytest.raises(ValueError, match="features"):
        made.draft(ROOT)
    made.reset(tokens[0])
    made.observe(Observation(tokens, features))
    with pytest.raises(RuntimeError, match="root"):
        made.draft(Frontier(torch.tensor([[1, 2]]), torch.tensor([0])))


@pytest.mark.parametrize("options", [{"phase": "aligned"}, {"query": "newest"}])
def test_a_pass_is_one_call_of_the_blocks(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    made = drafter(block=2, **options)
    calls = []
    made.backbone.register_forward_pre_hook(lambda *_: calls.append(1))
    tokens, features = rows(6)
    made.reset(tokens[0])
    for part in (slice(0, 3), slice(3, 6)):
        made.observe(Observation(tokens[part], features[part]))
    assert not calls
    made.draft(ROOT)
    assert len(calls) == 1
    made.draft(Frontier(torch.tensor([[1, 2], [3, 4]]), torch.tensor([0, 0])))
    assert len(calls) == 2
