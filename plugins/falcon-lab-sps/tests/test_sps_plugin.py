from __future__ import annotations

from sps_cases import FOLDER, drafter, engine

from falcon_lab.testing import check_distribution, lossless_rounds


def test_the_distribution_is_as_users_expect_one() -> None:
    check_distribution(FOLDER)


def test_what_is_registered_decodes() -> None:
    made, length = drafter(stir=0, hidden=16), {"name": "hf_length", "start": 3}
    limited = engine("llama", made, {"name": "chain", "depth": 6}, length)
    assert lossless_rounds(limited, [[3, 2]], 20)[0].depth == 3
