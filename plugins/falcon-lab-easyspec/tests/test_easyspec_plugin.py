from __future__ import annotations

from easyspec_cases import FOLDER

from falcon_lab.testing import check_distribution


def test_the_distribution_is_as_users_expect_one() -> None:
    check_distribution(FOLDER)
