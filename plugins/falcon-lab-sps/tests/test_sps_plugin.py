from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pluggy
from sps_cases import chain, engine, generate, plain, target

from falcon_lab import hookspecs
from falcon_lab.components import Component, Components
from falcon_lab.protocols import BuildContext

FOLDER = Path(__file__).parents[1]


class Recorder:
    """A ``Register`` that remembers drafters and controllers."""

    def __init__(self) -> None:
        self.found: list[Component] = []

    def drafter(self, name: str, build: str, *, config: type) -> None:
        self.found.append(Component("drafter", name, build, config, "falcon-lab-sps", "0"))

    def controller(self, name: str, build: str, *, config: type) -> None:
        self.found.append(Component("controller", name, build, config, "falcon-lab-sps", "0"))


def registered() -> list[Component]:
    """The components, found the way that an installed plug-in's are."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"][hookspecs.PROJECT].values()
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(import_module(module))
    manager.check_pending()
    recorder = Recorder()
    manager.hook.register_components(register=recorder)
    return recorder.found


def test_the_readme_names_every_option() -> None:
    text = (FOLDER / "README.md").read_text()
    for component in registered():
        for field in fields(component.config or object):
            assert f"| `{field.name}` | {field.default} |" in text


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, falcon_lab_sps; sys.exit('torch' in sys.modules)"
    env = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


def test_what_is_registered_decodes() -> None:
    components, context = Components(registered()), BuildContext(target("llama"), 1)
    drafter: Any = components.build("drafter", {"name": "sps", "hidden": 16}, context).eval()
    length = components.build("controller", {"name": "hf_length", "start": 3}, context)
    out = generate(engine("llama", drafter, chain(6), length), [3, 2], 20)
    assert out.tokens == plain("llama", [3, 2], 20)
    assert out.rounds[0].depth == 3
