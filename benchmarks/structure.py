"""Measure how a checkout is built: its size, which way its imports point, what runs, its words.

    python benchmarks/structure.py BEFORE [AFTER]

Each is the folder of a checkout; two of them stand side by side. Imports inside functions and for
type checking count, except in the longest chain. What a round and a training step import is counted
in a process of its own, on a tiny model with random weights. A docstring has no verb when none of
the verbs listed here is in its first sentence: some are missed, the same ones on both sides.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import TopologicalSorter
from itertools import combinations
from pathlib import Path

SHORT = 40
"""A file of fewer lines is counted as short."""

LEVELS = "## Which way imports point\n"
"""Heading in ``docs/architecture.md`` of the list that imports follow downwards."""

WORDS = (
    *("draft model", "draft tokens", "acceptance rate", "acceptance length", "bonus token"),
    *("attention mask", "KV cache", "hidden states", "training step", "decode step"),
    *("who sees whom", "told", "_told", "held_against", "write_on", "learn", "Lesson", "Arena"),
    *("Contestant", "yardstick", "Standing", "Promise", "Look", "AtOnce", "at_once", "lanes"),
    *("Runs", "Falling", "takes", "held", "spare", "keep", "probe", "rows"),
)

REPEATED = {
    "files that read a clock": r"\b(perf_counter|process_time|monotonic)\b",
    "files that wait for a GPU": r"cuda\.synchronize\(",
    "files that ask for versions": r"\bversions\(\)",
    "files that assemble an engine": r"= SpeculativeEngine\(|return SpeculativeEngine\(",
    "files with a table's columns": r"\balign\(|\bTable(\.of)?\(",
}
"""What is done in more than one place -> what shows it."""

ROUND = """
engine = SpeculativeEngine(
    target, drafter, StaticTree(StaticConfig("k2-8"), context), Greedy(None, context),
    Fixed(FixedConfig(), context),
)
written = engine.generate(
    torch.tensor([1, 2, 3]), max_new_tokens=12, sampling=Sampling(),
    generator=torch.Generator(), stop=StopCondition(),
)
assert len(written.tokens) == 12 and written.rounds
"""

STEP = """
from lightning.pytorch import Trainer
ones = torch.ones(2, 16, dtype=torch.long)
every = torch.arange(16).expand(2, 16)
batch = Batch(ones, ones.bool(), ones - 1, every, torch.tensor(0))
module = Distillation(
    target, drafter.train(), FalconObjective(FalconObjectiveConfig(), context),
    Csgd(CsgdConfig(start=0.4), context), DistillationConfig(), seed=0, max_steps=1,
)
trainer = Trainer(
    max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, accelerator="cpu",
)
trainer.fit(module, torch.utils.data.DataLoader([batch], batch_size=None))
assert trainer.global_step == 1
"""

MODEL = """
import sys, json, warnings, logging
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
import torch
from transformers import LlamaConfig, LlamaForCausalLM
{imports}

class Tokenizer:
    eos_token_id = None
    def get_vocab(self):
        return {{}}

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=128,
))
target = Target(model.eval(), Tokenizer(), name="tiny")
drafter = FalconDrafter(FalconConfig(block=2, dropout=0.0), BuildContext(target)).eval()
context = BuildContext(target, 2)
{body}
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "falcon_lab")))
"""

SHARED = ("Target", "FalconDrafter", "FalconConfig", "BuildContext")
RUNS = {
    "an eager Falcon round": (
        ROUND,
        (
            *("SpeculativeEngine", "StaticTree", "StaticConfig", "Greedy", "Fixed", "FixedConfig"),
            *("Sampling", "StopCondition"),
        ),
    ),
    "a training step": (
        STEP,
        (
            *("Batch", "Distillation", "FalconObjective", "FalconObjectiveConfig"),
            *("Csgd", "CsgdConfig", "DistillationConfig"),
        ),
    ),
}
"""What is run -> its code, and the classes that it needs, wherever a checkout defines them."""

VERBS = frozenset(
    re.findall(
        r"\S+",
        """
accept add adjust align allocate allow announce answer append apply arrange ask assemble assert
attach attend average begin bind blame bound break bring build bundle call cap capture carry
cast catch change check choose clear clip close coerce collect combine come commit compare
compile complain complete compute concatenate configure consume contain continue convert copy
correct cost count cover create cross cut decide decode define delete depend derive describe
detach detect differ discover distil divide do download draft draw drive drop embed emit encode
end ensure enter estimate evaluate exchange exclude exit expand expect explain export express
extend extract fail feed fetch fill filter find finish fit fix flatten follow forget format
forward freeze fuse gather generate get give go group grow guard guess hand handle have hide
hold identify ignore implement import include increase indicate infer initialise insert inspect
install instantiate interpret iterate join judge keep know label lay lead learn leave let limit
list load locate lock log look make map mark mask match mean measure merge mirror move multiply
name need normalise note notice number observe offer open order overwrite pack pad paint pair
parse pass patch perform pick place plan plot point predict prefill prefix prepare prescribe
preserve print produce project promise propose prove provide put quantise quote raise rank reach
read receive recognise record reduce refer refuse register reject release reload remember remove
rename render repeat replace replay report represent request require reserve reset resolve
restore restrict resume retry return reuse reveal reverse rewrite roll rotate round run sample
save say scale scan schedule score search see seek select send separate set share shift show
shuffle shut sign silence sit skip slice solve sort speak specify split stack stand start state
stay step stop store stream strip suggest sum summarise supply support switch synchronise take
tell test time tokenise trace train translate traverse treat trim truncate try tune turn undo
unpack unroll update upload use validate verify visit wait walk want warm warn weigh widen work
wrap write yield
""",
    )
)
FINITE = frozenset(
    re.findall(
        r"\S+",
        """
are be became can cannot could did does doesn't gave given goes had has have holds is isn't kept
knows made may might must says shall should taken took was were will would
""",
    )
)


@dataclass(frozen=True)
class Checkout:
    """A checkout of this repository.

    Attributes:
        folder: of the repository.
        name: of the package below ``src``.
    """

    folder: Path
    name: str = "falcon_lab"

    @cached_property
    def files(self) -> dict[str, Path]:
        """Return every module's file."""
        source = self.folder / "src"
        found = {}
        for path in sorted((source / self.name).rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
        return found

    @cached_property
    def lines(self) -> dict[str, int]:
        """Count the lines of every module."""
        return {name: len(text.splitlines()) for name, text in self.texts.items()}

    @cached_property
    def texts(self) -> dict[str, str]:
        """Return the source of every module."""
        return {name: path.read_text(encoding="utf-8") for name, path in self.files.items()}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Return the modules that every module imports, wherever in its file."""
        return {name: self._imports(ast.walk(ast.parse(t)), name) for name, t in self.texts.items()}

    @cached_property
    def loads(self) -> dict[str, set[str]]:
        """Return the modules that every module loads when it is imported itself."""
        return {name: self._imports(ast.parse(t).body, name) for name, t in self.texts.items()}

    def _imports(self, nodes: Iterable[ast.AST], own: str) -> set[str]:
        found = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inner & set(self.files) or {node.module}
        return found & set(self.files) - {own}

    def package(self, module: str) -> str:
        """Return the module's package or file directly below ``falcon_lab``."""
        return [*module.split("."), self.name][1]

    @cached_property
    def arrows(self) -> set[tuple[str, str]]:
        """Return which package imports which other one."""
        pairs = ((self.package(a), self.package(b)) for a, of in self.imports.items() for b in of)
        return {(a, b) for a, b in pairs if a != b}

    def order(self) -> list[list[str]]:
        """Return the checkout's own list of packages, the highest first; empty without one."""
        document = self.folder / "docs" / "architecture.md"
        text = document.read_text(encoding="utf-8") if document.is_file() else ""
        if LEVELS not in text:
            return []
        section = text.split(LEVELS, 1)[1].split("\n## ", 1)[0]
        listed = re.findall(r"^    (\w.*?)(?:  .*)?$", section, re.M)
        return [re.split(r",\s*", line) for line in listed]


def main(folders: Sequence[str]) -> str:
    """Measure every checkout; the table."""
    columns = [figures(Checkout(Path(folder).resolve())) for folder in folders]
    heads = ["", *(("before", "after") if len(columns) == 2 else map(str, folders))]
    rows = [[key, *(column.get(key, "—") for column in columns)] for key in columns[-1]]
    return table([heads, *rows])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align words left and figures right. A checkout of any age is measured, so nothing of the
    package is imported here."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def figures(checkout: Checkout) -> dict[str, str]:
    """Return everything that is measured of a checkout, as text."""
    return {
        **sizes(checkout),
        **directions(checkout),
        **loaded(checkout),
        **repetitions(checkout),
        **words(checkout),
    }


def sizes(checkout: Checkout) -> dict[str, str]:
    """Count lines, files and the modules at top level."""
    lines = checkout.lines
    top = [path for path in checkout.files.values() if path.parent.name == checkout.name]
    return {
        "source lines": f"{sum(lines.values()):,}",
        "source files": f"{len(lines)}",
        f"files of fewer than {SHORT} lines": f"{sum(n < SHORT for n in lines.values())}",
        "modules at top level": f"{len(top)}",
    }


def directions(checkout: Checkout) -> dict[str, str]:
    """Count circles, and arrows that run up."""
    arrows = checkout.arrows
    both = [(a, b) for a, b in arrows if a < b and (b, a) in arrows]
    circles = sorted((len(c) for c in circles_of(checkout.imports)), reverse=True)
    of = f" (of {', '.join(map(str, circles))} files)" if circles else ""
    own = checkout.order()
    order = own or best_order(arrows)
    level = {name: place for place, names in enumerate(order) for name in names}
    up = [(a, b) for a, b in arrows if level.get(a, -1) >= level.get(b, len(level))]
    return {
        "pairs of packages that import each other": f"{len(both)}",
        "circles of files": f"{len(circles)}{of}",
        "arrows that run up": f"{len(up)} ({'its own' if own else 'the best'} order)",
    }


def circles_of(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that reach each other, larger than one."""

    @cache
    def reach(start: str) -> frozenset[str]:
        found, left = set[str](), [start]
        while left:
            new = imports.get(left.pop(), set()) - found
            found |= new
            left += new
        return frozenset(found)

    groups, done = [], set[str]()
    for name in imports:
        if name in reach(name) and name not in done:
            group = {other for other in reach(name) if name in reach(other)}
            groups.append(group)
            done |= group
    return groups


def best_order(arrows: set[tuple[str, str]]) -> list[list[str]]:
    """Return an order of packages with few arrows that run up.

    Whoever imports most more than it is imported comes first; then neighbours change places as long
    as it helps. (An order with the fewest is hard to find for sure.)
    """
    names = sorted({name for arrow in arrows for name in arrow})
    out = {n: sum(a == n for a, _ in arrows) - sum(b == n for _, b in arrows) for n in names}
    order = sorted(names, key=lambda n: -out[n])
    better = True
    while better:
        better = False
        for i, j in combinations(range(len(order)), 2):
            moved = [*order[:i], order[j], *order[i:j], *order[j + 1 :]]
            if against(moved, arrows) < against(order, arrows):
                order, better = moved, True
    return [[name] for name in order]


def against(order: Sequence[str], arrows: set[tuple[str, str]]) -> int:
    """Count the arrows that run up in an order."""
    place = {name: at for at, name in enumerate(order)}
    return sum(place[a] > place[b] for a, b in arrows)


def loaded(checkout: Checkout) -> dict[str, str]:
    """Count what a round and a training step import."""
    found = {}
    for what, (body, classes) in RUNS.items():
        modules = modules_of(checkout, body, classes)
        if modules is None:
            continue
        lines = sum(checkout.lines.get(name, 0) for name in modules)
        found[f"{what}: modules"] = f"{len(modules)}"
        found[f"{what}: their lines"] = f"{lines:,}"
        found[f"{what}: longest chain of imports"] = f"{longest(checkout.loads, modules)}"
    return found


def modules_of(checkout: Checkout, body: str, classes: Sequence[str]) -> list[str] | None:
    """Return the package's modules that a process has after it ran; None where that fails."""
    homes = {name: home(checkout, name) for name in (*SHARED, *classes)}
    if None in homes.values():
        return None
    imports = "\n".join(f"from {module} import {name}" for name, module in homes.items())
    path = os.pathsep.join([str(checkout.folder / "src"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", MODEL.format(imports=imports, body=body)],
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return None
    modules: list[str] = json.loads(done.stdout.splitlines()[-1])
    return modules


def home(checkout: Checkout, name: str) -> str | None:
    """Return the module that defines a class."""
    pattern = re.compile(rf"^class {name}\b", re.M)
    return next((module for module, text in checkout.texts.items() if pattern.search(text)), None)


def longest(imports: Mapping[str, set[str]], among: Iterable[str]) -> int:
    """Count the modules of the longest chain of imports; those of a circle count as one."""
    inside = set(among)
    graph = {name: imports.get(name, set()) & inside for name in inside}
    group = {name: frozenset({name}) for name in graph}
    for circle in circles_of(graph):
        group |= dict.fromkeys(circle, frozenset(circle))
    below: dict[frozenset[str], set[frozenset[str]]] = {}
    for name, of in graph.items():
        below.setdefault(group[name], set()).update(group[o] for o in of if group[o] != group[name])
    length: dict[frozenset[str], int] = {}
    for one in TopologicalSorter(below).static_order():
        length[one] = 1 + max((length[other] for other in below[one]), default=0)
    return max(length.values(), default=0)


def repetitions(checkout: Checkout) -> dict[str, str]:
    """Count the files in which something is done that one would be enough for."""
    return {
        what: f"{sum(bool(re.search(pattern, text)) for text in checkout.texts.values())}"
        for what, pattern in REPEATED.items()
    }


def words(checkout: Checkout) -> dict[str, str]:
    """Count docstrings without a verb, and words."""
    every = [text for source in checkout.texts.values() for text in docstrings(source)]
    functions = [t for source in checkout.texts.values() for t in docstrings(source, FUNCTIONS)]
    everything = "\n".join(checkout.texts.values())
    plain = re.sub(r"\s+", " ", everything)
    return {
        "docstrings without a verb": f"{sum(map(is_fragment, every))} of {len(every)}",
        "those of functions": f"{sum(map(is_fragment, functions))} of {len(functions)}",
        **{f"“{word}”": f"{count(word, plain)}" for word in WORDS},
    }


def count(word: str, text: str) -> int:
    """Count a word, or a part of a name that begins or ends with an underscore."""
    before, after = ("" if word.startswith("_") else r"(?<![A-Za-z])"), r"(?![a-z])"
    plural = "" if word.endswith("s") else "s?"
    flags = 0 if word[0].isupper() else re.IGNORECASE
    return len(re.findall(f"{before}{re.escape(word)}{plural}{after}", text, flags))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(
    source: str, kinds: tuple[type[ast.AST], ...] = (ast.Module, ast.ClassDef, *FUNCTIONS)
) -> Iterator[str]:
    """Yield the docstrings of a file's module, classes and functions, or of some of them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds):
            assert isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
            if text := ast.get_docstring(node):
                yield text


def is_fragment(docstring: str) -> bool:
    """Whether a docstring's first sentence has no verb that the lists know."""
    sentence = re.split(r"(?<=[.:;])\s|\n\n", docstring.replace("\n", " "), maxsplit=1)[0]
    found = re.findall(r"[a-z']+", sentence.lower())
    if not found:
        return True
    return not (found[0] in VERBS or any(w in FINITE or stem(w) in VERBS for w in found[1:]))


def stem(word: str) -> str:
    """Return the verb of which a word may be the third person or the past; else the word."""
    for ending, rest in ENDINGS:
        if word.endswith(ending) and word.removesuffix(ending) + rest in VERBS:
            return word.removesuffix(ending) + rest
    return ""


ENDINGS = (("ies", "y"), ("es", ""), ("s", ""), ("ied", "y"), ("ed", ""), ("ed", "e"))


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit(__doc__)
    sys.stdout.write(main(sys.argv[1:]) + "\n")
