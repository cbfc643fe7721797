from __future__ import annotations

from lookup_cases import FOLDER, KNOWN, engine, target

from falcon_lab.testing import accepted, build_drafter, check_distribution, lossless_rounds


def test_the_distribution_is_as_users_expect_one() -> None:
    check_distribution(FOLDER)


def test_greedy_output_is_the_targets_own_and_the_copies_are_used() -> None:
    lookup = build_drafter(target(), {"name": "lookup", "num_tokens": 3}, components=KNOWN)
    one = engine(target(), lookup, tree={"name": "chain", "depth": 3})
    prompts = [[first, first + 1, first, first + 2] for first in range(8)]
    assert accepted(lossless_rounds(one, prompts, 60)) > 0
