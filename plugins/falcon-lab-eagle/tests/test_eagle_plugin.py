from __future__ import annotations

import re
from typing import Any

import pytest
from eagle_cases import FOLDER, KNOWN, engine, target
from omegaconf import OmegaConf

from falcon_lab.testing import build_drafter, check_distribution, lossless_rounds
from falcon_lab.testing.distributions import registered

RECIPES = re.findall(r"```yaml\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)


def test_the_distribution_is_as_users_expect_one() -> None:
    check_distribution(FOLDER)
    assert [component.name for component in registered(FOLDER)] == [
        "eagle",
        "eagle3",
        "fspad",
        "eagle1",
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_the_readme_decodes(recipe: str) -> None:
    node: Any = OmegaConf.to_container(OmegaConf.create(recipe))
    for key, kind in (("objective", "objective"), ("glancing", "schedule")):
        KNOWN.check(kind, node[key], key)
    drafter = build_drafter(target(), node["drafter"], components=KNOWN)
    lossless_rounds(engine(target(), drafter, tree=node["tree"]), [[3, 1, 4]], 12)


@pytest.mark.parametrize(
    ("name", "options"),
    [("eagle", {"layers": 0}), ("eagle3", {"taps": []}), ("eagle3", {"head": "x"})],
)
def test_wrong_options_are_refused_by_name(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=next(iter(options))):
        KNOWN.check("drafter", {"name": name, **options}, "drafter")
