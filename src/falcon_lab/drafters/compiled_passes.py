"""Drafters whose passes may be compiled ones."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

from falcon_lab.interfaces import Announce, Drafter, PassCompiler, Recorder
from falcon_lab.model.passes import ForwardPass, PassMaker


class CompilablePasses(Drafter):
    """A drafter that computes through ``ForwardPass``es, whichever way these are run.

    Its constructor calls ``draft_through(EagerPass)``.

    Attributes:
        host: the target.
    """

    host: Any

    @abstractmethod
    def draft_through(self, make: PassMaker) -> None:
        """Draft through passes that ``make`` makes from now on, and forget the text."""

    @property
    @abstractmethod
    def passes(self) -> Sequence[ForwardPass]:
        """Return what ``draft_through`` has made, first the pass that every round begins with."""

    def compiled(
        self,
        announce: Announce,
        compiler: PassCompiler | None = None,
        recorder: Recorder | None = None,
    ) -> Self:
        """Return the same drafter and weights where they are, drafting through compiled passes.

        On a GPU they are CUDA graphs, and one sequence is drafted for at a time.

        Args:
            announce: is called with one line for the user at a time.
            compiler: compiles the passes on a CPU; None: inductor, ahead of time.
            recorder: captures graphs; None: on a GPU alone.
        """
        from falcon_lab.model.fast_passes import fast_passes  # an eager drafter stands without

        other = copy.copy(self)
        other.draft_through(fast_passes(self.host.device, announce, compiler, recorder))
        return other

    @property
    def is_compiled(self) -> bool:
        """Return whether its passes are compiled."""
        return not self.passes[0].is_eager

    def prepare(self, longest: int) -> None:
        """Compile the passes of rounds of up to so many new tokens now, if they are to be."""
        for each in self.passes:
            each.prepare(longest)
