"""What a drafter promises."""

from __future__ import annotations

from falcon_lab.interfaces import is_trainable
from falcon_lab.testing import drafting, learning, saving, seeing, speculating
from falcon_lab.testing.conversation import Case
from falcon_lab.testing.subject import Recipe, Subject
from falcon_lab.testing.targets import tiny_target

VOCABULARY, POSITIONS = 12, 48


def check_drafter(drafter: Recipe, *, family: str = "llama", seed: int = 0) -> None:
    """See that a drafter keeps its promises, on a tiny random target.

    - It is a ``Drafter``, its passes have the shapes of ``DraftOutput``, and it changes nothing
      that it is given.
    - Drafting does not depend on how its state came about: what was drafted leaves no trace, a
      prompt in parts is the whole prompt, rows observed in several rounds are rows observed at
      once, a tree's branch is a chain, and ``reset`` leaves nothing behind.
    - One whose passes can be compiled drafts the same through compiled passes and through graphs,
      which stand-ins take the place of (``testing/compiling.py``).
    - One with weights: every weight gets a gradient and the target none; a row's prediction does
      not depend on inputs newer than its ``source``; packed documents are separate ones and B
      sequences are B times one; glances show what they say; what training predicts is what
      drafting predicts (and so in every pass of its ``unroll``); saved and loaded it is the
      same.
    - With every built-in tree, greedy output is the target's token for token, and sampled output
      follows the target's distribution, at the edges too: a prompt of one token, an end inside a
      draft, budgets of nothing, the target's last position, and rows of a batch.

    Args:
        drafter: a YAML node, or what builds a drafter from a ``BuildContext``.
        family: of the target: a name among ``falcon_lab.testing.targets.FAMILIES``.
        seed: of everything random.

    Raises:
        ContractError: it does not.
    """
    subject = Subject("drafter", drafter, seed)
    target = tiny_target(family, vocab=VOCABULARY, positions=POSITIONS)
    case = Case(subject, target)
    with subject.step("that it is a drafter"):
        drafting.check_declarations(case)
        made = case.fresh()
    trained = [*learning.CHECKS, *seeing.CHECKS, *saving.CHECKS] if is_trainable(made) else []
    for promise, check in [*drafting.CHECKS, *trained, *speculating.CHECKS]:
        with subject.step(promise):
            check(case)
