"""The two forward passes that Falcon's drafting is made of, plain and compiled.

Shapes: D sequences (the root's one, or F branches), L rows of a sequence, R rows of a pass over the
decoder blocks, W columns of a mask, H hidden.
"""

from __future__ import annotations

from torch import Tensor

from falcon_lab.compiling.ahead import Announce, PassCompiler, compile_ahead
from falcon_lab.compiling.lstm import CompiledLSTM
from falcon_lab.compiling.rows import SPARE, CompiledRows
from falcon_lab.drafters.fusing import Fuse, State
from falcon_lab.targets.backbone import Backbone
from falcon_lab.targets.kv_cache import KVCache


class Passes:
    """The modules as they are.

    Attributes:
        spare: cache rows that a pass needs beyond those of its sequence.
    """

    spare = 0

    def __init__(self, fuse: Fuse, backbone: Backbone) -> None:
        self._fuse = fuse
        self._backbone = backbone

    def fuse(self, rows: Tensor, state: State | None) -> tuple[Tensor, State | None]:
        """``[D, L, 2H]`` joined rows, going on from a state -> ``[D, L, H]`` and the next state."""
        fused: tuple[Tensor, State | None] = self._fuse(rows, state)
        return fused

    def blocks(
        self, rows: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """Append rows to the cache.

        Args:
            rows: ``[1, R, H]``, fused.
            positions: ``[1, R]`` long.
            mask: ``[1, R, W]`` bool, who sees whom among the last W keys; None: all see all.
            cache: earlier rows.

        Returns:
            ``[1, R, H]``.
        """
        hidden: Tensor = self._backbone(
            embeddings=rows, positions=positions, mask=mask, cache=cache
        )
        return hidden


class CompiledPasses(Passes):
    """The same passes compiled; prompts go through the modules.

    Args:
        fuse, backbone: the drafter's.
        announce: takes one line for the user at a time.
        compiler: makes the passes.
    """

    spare = SPARE

    def __init__(
        self,
        fuse: Fuse,
        backbone: Backbone,
        announce: Announce,
        compiler: PassCompiler = compile_ahead,
    ) -> None:
        super().__init__(fuse, backbone)
        self._lstm = CompiledLSTM(fuse, announce, compiler) if fuse.kind == "lstm" else None
        self._rows = CompiledRows(backbone, None, "drafter", announce, compiler)

    def fuse(self, rows: Tensor, state: State | None) -> tuple[Tensor, State | None]:
        """As ``Passes``."""
        if self._lstm is None or state is None or not self._lstm.takes(rows):
            return super().fuse(rows, state)
        return self._lstm(rows, state)

    def blocks(
        self, rows: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """As ``Passes``."""
        if not self._rows.takes(rows.shape[1], cache):
            return super().blocks(rows, positions, mask, cache)
        who = None if mask is None else mask[0]
        return self._rows(rows[0], positions[0], who, cache)[0].unsqueeze(0)
