from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pluggy
import pytest
from eagle_cases import engine, generate, plain, target
from omegaconf import OmegaConf

from falcon_lab import builtins, hookspecs
from falcon_lab.components import Components
from falcon_lab.plugins import Registrar
from falcon_lab.protocols import BuildContext

FOLDER = Path(__file__).parents[1]


def registered() -> Components:
    """What ships with falcon-lab and what the plug-in adds, found as an installed one's is."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"][hookspecs.PROJECT].values()
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    found: list[Any] = []
    for name, plugin in (("falcon-lab", builtins), (project["name"], import_module(module))):
        manager.register(plugin)
        registrar = Registrar(name, "0")
        plugin.register_components(registrar)
        found += registrar.components
    manager.check_pending()
    return Components(found)


RECIPES = re.findall(r"```yaml\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)


def test_the_readme_names_every_option() -> None:
    text = (FOLDER / "README.md").read_text()
    own = [c for c in registered().components if c.distribution == "falcon-lab-eagle"]
    assert [component.name for component in own] == ["eagle", "eagle3", "eagle1"]
    for component in own:
        assert f"`{component.name}`" in text
        for field in fields(component.config) if component.config else ():
            assert f"| `{field.name}` | {field.default} |" in text


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_the_readme_decodes(recipe: str) -> None:
    node: Any = OmegaConf.to_container(OmegaConf.create(recipe))
    components, context = registered(), BuildContext(target())
    for key, kind in (("objective", "objective"), ("glancing", "schedule")):
        components.check(kind, node[key], key)
    drafter = components.build("drafter", node["drafter"], context).eval()
    context = BuildContext.of(target(), drafter)
    tree = components.build("tree_builder", node["tree"], context)
    assert generate(engine(drafter, tree), [3, 1, 4], 12).tokens == plain([3, 1, 4], 12)


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, falcon_lab_eagle; sys.exit('torch' in sys.modules)"
    env = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [("eagle", {"layers": 0}), ("eagle3", {"taps": []}), ("eagle3", {"head": "x"})],
)
def test_wrong_options_are_refused_by_name(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=next(iter(options))):
        registered().check("drafter", {"name": name, **options}, "drafter")
