from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import torch

from falcon_lab import hookspecs
from falcon_lab.acceptance.auto import Auto
from falcon_lab.builtins import ChainConfig, FixedConfig
from falcon_lab.controllers.fixed import Fixed
from falcon_lab.decoding.baseline import PlainEngine
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.sampling import Sampling
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.protocols import BuildContext
from falcon_lab.trees.chain import Chain

FOLDER = Path(__file__).parents[1]


class Recorder:
    """A ``Register`` that remembers drafters; another kind would be an AttributeError."""

    def __init__(self) -> None:
        self.drafters: dict[str, tuple[str, type]] = {}

    def drafter(self, name: str, build: str, *, config: type) -> None:
        self.drafters[name] = (build, config)


def registered() -> dict[str, tuple[str, type]]:
    """The builders and configurations, found the way that an installed plug-in's are."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"][hookspecs.PROJECT].values()
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(import_module(module))
    manager.check_pending()
    recorder = Recorder()
    manager.hook.register_components(register=recorder)
    return recorder.drafters


def build(name: str, context: BuildContext, **options: int) -> Any:
    path, config = registered()[name]
    module, _, builder = path.partition(":")
    return getattr(import_module(module), builder)(config(**options), context)


def test_the_readme_names_every_option() -> None:
    text = (FOLDER / "README.md").read_text()
    for _, config in registered().values():
        assert all(f"| `{field.name}` | {field.default} |" in text for field in fields(config))


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, falcon_lab_lookup; sys.exit('torch' in sys.modules)"
    env = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from falcon_lab.targets.target import Target

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(
        **shape, vocab_size=16, num_attention_heads=2, max_position_embeddings=256, eos_token_id=15
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        no_words: Any = SimpleNamespace(get_vocab=dict, eos_token_id=None)
        return Target(LlamaForCausalLM(config), no_words, name="tiny")


def test_greedy_output_is_the_targets_own_and_the_copies_are_used() -> None:
    target = tiny_llama()
    context = BuildContext(target, block=3)
    lookup = build("lookup", context, num_tokens=3)
    parts = (Chain(ChainConfig(depth=3), context), Auto(None, context))
    engine = SpeculativeEngine(target, lookup, *parts, Fixed(FixedConfig(), context))
    settings: Any = {
        "max_new_tokens": 60,
        "sampling": Sampling(),
        "generator": torch.Generator(),
        "stop": StopCondition(),
    }
    accepted = 0
    for first in range(8):
        prompt = torch.tensor([first, first + 1, first, first + 2])
        ours = engine.generate(prompt, **settings)
        assert ours.tokens == PlainEngine(target).generate(prompt, **settings).tokens
        accepted += sum(round_.accepted for round_ in ours.rounds)
    assert accepted > 0
