"""A target that is a table: the next token depends on the last two. Everything about it is exact.

Shapes: P prompt tokens, N tree nodes, n new rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor

from falcon_lab.model.target import TargetOutput
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree


class TableCache:
    """The tokens that were read, row by row, moved as a KV cache moves its rows."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[int] = []

    @property
    def length(self) -> int:
        return len(self.rows)

    def append(self, tokens: list[int]) -> None:
        self.rows += tokens
        assert self.length <= self.capacity, "the cache is too small"

    def reset(self) -> None:
        self.rows.clear()

    def commit(
        self,
        starts: Sequence[int],
        paths: Sequence[Sequence[int]],
        nodes: Sequence[Tensor] = (),
    ) -> None:
        (start,), (path,) = starts, paths
        assert all(one.tolist() == path for one in nodes)
        self.rows[start:] = [self.rows[start + node] for node in path]


class TableTarget:
    """Satisfies what engines need of ``Target``. ``features[i]`` is (token read, its position)."""

    def __init__(
        self, vocab: int = 6, *, seed: int = 0, scale: float = 1.5, positions: int = 10_000
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = scale * torch.randn(vocab, vocab, vocab, generator=generator)
        self.vocab_size = vocab
        self.hidden_size = 2
        self.max_positions = positions
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.eos_ids: frozenset[int] = frozenset()
        self.kv_allocated = 0
        self.config: Any = SimpleNamespace(num_hidden_layers=1)

    def tapped(self, layers: Sequence[int]) -> Self:
        assert not layers
        return self

    def new_cache(self, capacity: int) -> Any:
        return TableCache(capacity)

    def prefill(self, tokens: Tensor, cache: TableCache) -> TargetOutput:
        before = cache.length
        cache.append(tokens.tolist())
        history = torch.tensor([0, *cache.rows])
        logits = self.table[history[-2], history[-1]][None]
        return TargetOutput(logits, self._features(tokens, torch.arange(before, cache.length)))

    def read(self, tokens: Tensor, cache: TableCache, *, chunk: int) -> Iterator[TargetOutput]:
        for part in tokens.split(chunk):
            yield self.prefill(part, cache)

    def kv_bytes(self, capacity: int) -> int:
        return 8 * capacity

    def step(self, token: Tensor, cache: TableCache) -> TargetOutput:
        return self.prefill(token[None], cache)

    def verify(self, tree: TokenTree, cache: TableCache) -> TargetOutput:
        assert torch.equal(tree.drafts.depth, tree.drafts.ancestors.sum(-1) - 1)
        positions = cache.length + tree.depth
        assert int(positions.max()) < self.max_positions
        parents = torch.cat((tree.parents, tree.parents.new_full((tree.auxiliary,), -1)))
        before = torch.cat((tree.tokens, torch.tensor(cache.rows[-1:])))[parents]
        cache.append(tree.tokens.tolist())
        return TargetOutput(self.table[before, tree.tokens], self._features(tree.tokens, positions))

    def joint(self, prompt: list[int], sampling: Sampling, tokens: int) -> Tensor:
        """``[V] * tokens``: the exact distribution of the next ones."""
        p = sampling.probabilities(self.table.double()).double()
        first = p[prompt[-2] if len(prompt) > 1 else 0, prompt[-1]]
        if tokens == 1:
            return first
        second = first[:, None] * p[prompt[-1]]
        for _ in range(tokens - 2):
            second = second[..., None] * p.expand(*second.shape, self.vocab_size)
        return second

    def _features(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return torch.stack((tokens, positions), -1).float()
