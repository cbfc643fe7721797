"""Models of a given shape with random weights, made where they are to run: nothing is downloaded.

What a pass costs depends on shapes alone. What is written, and how much of it a drafter guesses,
depends on weights, and is never measured here.

What a GPU makes of a large model's shape: how far from its floor, and what drafting would bring.

Weights are random: speed is measured, acceptance is assumed, and marked so wherever it is named.

Shapes: C tokens of context, N nodes of a tree, V vocabulary.

The measurements of ``gpu_shape.py`` as aligned plain text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from falcon_bench.gpu_timing import PARTS, Rate, rates, write
from falcon_bench.shapes import Assumed
from falcon_lab.controllers import Fixed
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import BuildContext, Recorder
from falcon_lab.measure import provenance
from falcon_lab.measure.measurement import Engine
from falcon_lab.measure.pass_costs import verifying
from falcon_lab.model.attention.choosing import MERGING, use_backend
from falcon_lab.model.recording import recorder_for
from falcon_lab.model.self_check import check_target
from falcon_lab.model.target import Target
from falcon_lab.plugins.builtins import FalconConfig, FixedConfig, StaticConfig
from falcon_lab.report.tables import Column, Table, decimals, percent
from falcon_lab.studies.bench import HF, HF_STATIC, METHODS
from falcon_lab.studies.bench.loops import hf_modes
from falcon_lab.studies.bench.machine import Machine, PassCost, measure_machine
from falcon_lab.timing import fastest
from falcon_lab.trees.template_tree import StaticTree


@dataclass(frozen=True)
class LlamaShape:
    """A Llama's shape; the defaults are Llama 2 7B's (arXiv 2307.09288), with room for a longer
    text."""

    vocabulary: int = 32_000
    hidden: int = 4096
    intermediate: int = 11_008
    layers: int = 32
    heads: int = 32
    groups: int = 32
    positions: int = 16_384


def random_target(
    shape: LlamaShape, device: torch.device, dtype: torch.dtype, *, seed: int = 0
) -> Target:
    """Return a target of that shape, through the lean forward, with PyTorch's attention."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        max_position_embeddings=shape.positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return Target(model, number_tokenizer(shape.vocabulary), name="random Llama", lean=True)


def random_drafter(target: Target, block: int, *, seed: int = 0) -> FalconDrafter:
    """Falcon's drafter with default options, where the target is and in its precision."""
    with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(seed)
        drafter = FalconDrafter(FalconConfig(block=block), BuildContext(target))
    return drafter.to(target.device, target.dtype).eval().requires_grad_(False)


def number_tokenizer(vocabulary: int) -> Any:
    """A tokenizer whose words are its tokens' numbers; none of them ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="0")


EAGER, GRAPHS = "plain, eager", "plain, graphs"
PAPER = {"MT-bench": 2.82, "HumanEval": 3.30, "GSM8K": 3.02}
"""Drafts accepted a round by Falcon with LLaMA2-Chat 7B (arXiv 2412.12639, table 3)."""

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        shape: of the target.
        dtype: of everything.
        contexts: C, one after the other.
        nodes: N of the trees that are verified, the root counted.
        tokens: that each loop writes.
        repeats: timed turns of the loops.
        seconds: for each figure of a pass.
        block: k of the drafter.
        template: of the speculative loop's tree.
        accepted: drafts a round that are assumed to be accepted, beside the paper's.
        attention: as ``target.attention``.
        static: whether Hugging Face's static cache is measured; it compiles for minutes.
    """

    shape: LlamaShape = field(default_factory=LlamaShape)
    dtype: str = "bfloat16"
    contexts: Sequence[int] = (512, 8192)
    nodes: Sequence[int] = (1, 8, 16, 32, 64)
    tokens: int = 128
    repeats: int = 3
    seconds: float = 1.0
    block: int = 2
    template: str = "k2-16"
    accepted: Sequence[float] = (0, 1, 2, 3, 4)
    attention: str = "auto"
    static: bool = True


TOY = Plan(
    shape=LlamaShape(64, 32, 64, 2, 4, 2, 256),
    dtype="float32",
    contexts=(12, 40),
    nodes=(1, 4),
    tokens=16,
    repeats=1,
    seconds=0.005,
    template="k2-8",
    accepted=(0, 1.5),
    attention="torch_flash",
)
"""The same in a few seconds on a CPU."""


def bench_shape(
    plan: Plan, device: torch.device, announce: Announce, recorder: Recorder | None = None
) -> dict[str, Any]:
    """Measure everything at every context.

    Args:
        plan: what, and how large.
        device: where.
        announce: is called with one line for the user at a time.
        recorder: captures graphs; None: CUDA graphs, where there are any.

    Returns:
        ``date``, ``command``, ``versions``, ``hardware``, ``git``, ``plan``, ``notes`` (what was
        announced on the way), ``machine``, ``cost`` (of a target pass) and ``contexts``: what
        ``at_context`` says of each.
    """
    notes: list[str] = []

    def tell(line: str) -> None:
        notes.append(line)
        announce(line)

    announce("making a model with random weights")
    target = random_target(plan.shape, device, getattr(torch, plan.dtype))
    theirs = copy_for_hf(target)
    if plan.attention in MERGING:
        use_backend(target, plan.attention, tell)
    check_target(target)
    cost = PassCost.of(target)
    assert cost is not None
    header = provenance.header(target)
    announce("measuring what this machine copies and multiplies")
    machine = measure_machine(device, target.dtype, cost.weight_bytes, seconds=plan.seconds)
    drafter = random_drafter(target, plan.block)
    graphs = target
    if recorder := recorder or recorder_for(device):
        graphs = target.compiled(tell, recorder=recorder)
        drafter = drafter.compiled(tell, recorder=recorder)
    else:
        tell(f"there are no CUDA graphs on {device.type}: passes of that name are eager too")
    bench = Bench(plan, target, graphs, theirs, drafter, cost, machine, announce)
    return {
        **header,
        "plan": asdict(plan),
        "machine": asdict(machine),
        "cost": asdict(cost),
        "contexts": [bench.at_context(context) for context in plan.contexts],
        "notes": list(dict.fromkeys(notes)),
    }


def copy_for_hf(target: Target) -> Target:
    """The same weights in modules of their own, which keep the attention they were made with."""
    model = target.model
    own = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in own})
    return Target(twin, target.tokenizer, name=target.name)


class Bench:
    """The parts of one measurement.

    Args:
        plan: what is measured.
        target: through the lean forward.
        graphs: the same, its passes captured.
        theirs: its weights, for ``generate``.
        drafter: with random weights too, its passes captured.
        cost: of a target pass.
        machine: what it can do at the most.
        announce: is called with one line for the user at a time.
    """

    def __init__(
        self,
        plan: Plan,
        target: Target,
        graphs: Target,
        theirs: Target,
        drafter: FalconDrafter,
        cost: PassCost,
        machine: Machine,
        announce: Announce,
    ) -> None:
        self.plan, self.cost, self.machine, self.announce = plan, cost, machine, announce
        self.target, self.graphs, self.theirs, self.drafter = target, graphs, theirs, drafter

    def at_context(self, context: int) -> dict[str, Any]:
        """Measure everything behind a prompt of C tokens.

        Returns:
            ``context``; ``loops``, name -> rate and ``floor_reached``; ``left_out``; ``passes``,
            milliseconds and ``over_one`` of trees, eager and as graphs; ``assumed``, a list with
            ``drafts`` (assumed to be accepted a round), ``source``, rate, and ``over_plain``.
        """
        self.announce(f"context {context}")
        drawn = torch.Generator().manual_seed(context)
        prompt = torch.randint(0, self.target.vocab_size, (context,), generator=drawn)
        prompt = prompt.to(self.target.device)
        engines, left_out = self.engines(prompt)
        found = self.rates(engines, prompt)
        assumed = list(self.assumed(prompt, found[GRAPHS]))
        return {
            "context": context,
            "loops": {
                name: rate.as_dict() | {"floor_reached": self.reached(rate, context)}
                for name, rate in found.items()
            },
            "left_out": left_out,
            "passes": self.passes(context),
            "assumed": assumed,
        }

    def engines(self, prompt: Tensor) -> tuple[dict[str, Engine], dict[str, str]]:
        """Our plain loop both ways, and Hugging Face's modes with those that this model refuses."""
        asked = [HF, HF_STATIC] if self.plan.static else [HF]

        def attempt(engine: Engine) -> object:
            return write(engine, prompt, self.plan.tokens)

        modes, left_out = hf_modes(self.theirs, asked, attempt=attempt)
        ours: dict[str, Engine] = {
            GRAPHS: PlainEngine(self.graphs),
            EAGER: PlainEngine(self.target),
        }
        return {**ours, **modes}, left_out

    def rates(self, engines: dict[str, Any], prompt: Tensor) -> dict[str, Rate]:
        """Of some loops, in turns."""
        from falcon_lab.measure.hf_generate import HfGenerate

        return rates(
            engines,
            prompt,
            self.plan.tokens,
            repeats=self.plan.repeats,
            reading=HfGenerate(self.theirs),
            announce=self.announce,
        )

    def reached(self, rate: Rate, context: int) -> float:
        """The least time for a plain loop's tokens over what they took: 1 is the floor."""
        bytes_per_second = self.machine.bytes_per_second
        steps = range(context, context + rate.tokens - 1)
        least = sum(self.cost.bytes(1, seen) for seen in steps) / bytes_per_second
        return least / (rate.seconds * len(steps))

    @torch.inference_mode()
    def passes(self, context: int) -> list[dict[str, Any]]:
        """Measure the milliseconds of passes over trees of N nodes, eager and as graphs."""
        found: list[dict[str, Any]] = []
        for nodes in self.plan.nodes:
            row: dict[str, Any] = {"nodes": nodes}
            for name, target in (("graphs", self.graphs), ("eager", self.target)):
                timed = verifying(target, "context", nodes, context, nodes)

                def once(timed: Any = timed) -> None:
                    timed.run()
                    timed.after()

                took = fastest(once, target.device, seconds=self.plan.seconds)
                row[name] = 1000 * took
                row[f"{name}_over_one"] = row[name] / (found[0] if found else row)[name]
            row["floor"] = 1000 * self.cost.bytes(nodes, context) / self.machine.bytes_per_second
            found.append(row)
        return found

    def assumed(self, prompt: Tensor, plain: Rate) -> Iterator[dict[str, Any]]:
        """The speculative loop, with so many drafts accepted in every round as is assumed."""
        cases = [("assumed", float(drafts)) for drafts in self.plan.accepted]
        cases += [(f"the paper's, {name}", drafts) for name, drafts in PAPER.items()]
        for source, drafts in cases:
            engine = self.speculative(drafts)
            if engine is None:
                continue
            name = f"{drafts:.2f} drafts a round, {source}"
            rate = self.rates({name: engine}, prompt)[name]
            assert rate.round is not None
            assert plain.round is not None
            each = rate.round["draft"] / rate.passes if rate.passes else None
            yield {
                "drafts": drafts,
                "source": source,
                **rate.as_dict(),
                "over_plain": plain.seconds / rate.seconds,
                "draft_pass_share": None if each is None else 100 * each / plain.round["verify"],
            }

    def speculative(self, drafts: float) -> SpeculativeEngine | None:
        """The loop in which so many are accepted; None where the tree is not as deep."""
        context = BuildContext(self.graphs, self.plan.block)
        tree = StaticTree(StaticConfig(self.plan.template), context)
        if drafts > tree.max_depth:
            self.announce(f"{drafts} drafts cannot be accepted of a tree of depth {tree.max_depth}")
            return None
        rule = Assumed(tree.paths, drafts, self.graphs)
        fixed = Fixed(FixedConfig(), context)
        return SpeculativeEngine(self.graphs, self.drafter, tree, rule, fixed)


def _round_part(part: str) -> Column:
    header = "other ms" if part == PARTS[-1] else part
    return Column(header, lambda row: row["round"][part], decimals(3, scale=1000))


LOOPS = (
    Column("loop", "name"),
    Column("ms/token", "seconds", decimals(3, scale=1000)),
    Column("tok/s", "tokens_per_second", decimals(1)),
    Column("of floor %", "floor_reached", percent(1)),
    Column("over HF", "over_hf", decimals(2, unit="×")),
    Column("overhead %", "overhead", decimals(1)),
)
PASSES = (
    Column("rows", "nodes"),
    Column("graphs ms", "graphs", decimals(3)),
    Column("× one token", "graphs_over_one", decimals(2)),
    Column("eager ms", "eager", decimals(3)),
    Column("× one token", "eager_over_one", decimals(2)),
    Column("floor ms", "floor", decimals(3)),
)
ASSUMED = (
    Column("drafts a round (assumed)", lambda row: f"{row['drafts']:.2f} ({row['source']})"),
    Column("tok/s", "tokens_per_second", decimals(1)),
    Column("over plain", "over_plain", decimals(2, unit="×")),
    Column("τ", "tau", decimals(2)),
    *map(_round_part, PARTS),
    Column("overhead %", "overhead", decimals(1)),
    Column("drafter pass, % of the target's", "draft_pass_share", decimals(1)),
)


def format_shape(results: Mapping[str, Any]) -> str:
    """Write three tables for every context, and what the machine is.

    Args:
        results: of ``bench_shape``.
    """
    machine, hardware = results["machine"], results["hardware"]
    blocks = [
        f"{hardware['gpu'] or hardware['cpu']}: {machine['bytes_per_second'] / 1e9:.0f} GB/s in "
        f"copies, {machine['operations_per_second'] / 1e12:.1f} TFLOP/s; "
        f"{results['cost']['weight_bytes'] / 1e9:.2f} GB of weights, random"
    ]
    for found in results["contexts"]:
        tables = (_loops(found), Table(PASSES, found["passes"]), Table(ASSUMED, found["assumed"]))
        blocks += [f"context {found['context']}", *map(str, tables)]
        blocks += [f"left out: {name} ({why})" for name, why in found["left_out"].items()]
    return "\n\n".join([*blocks, *results["notes"]])


def _loops(found: Mapping[str, Any]) -> Table:
    """Return the table of the loops, each beside Hugging Face's."""
    theirs = found["loops"].get(METHODS[HF])
    return Table(
        LOOPS,
        [
            {
                **rate,
                "name": name,
                "over_hf": theirs["seconds"] / rate["seconds"] if theirs else None,
            }
            for name, rate in found["loops"].items()
        ],
    )


def verdicts(results: Mapping[str, Any]) -> list[str]:
    """What is hoped for, and what was found, line by line."""
    lines = []
    for found in results["contexts"]:
        loops, where = found["loops"], f"context {found['context']}"
        reached = loops[GRAPHS]["floor_reached"]
        lines.append(
            _verdict(f"{where}: {100 * reached:.1f} % of the floor", reached >= 0.85, "85")
        )
        others = {n: r["seconds"] for n, r in loops.items() if n not in (GRAPHS, EAGER)}
        best = min(others, key=lambda name: others[name], default=None)
        if best is not None:
            ratio = others[best] / loops[GRAPHS]["seconds"]
            lines.append(_verdict(f"{where}: {ratio:.2f}× {best}", ratio > 1, "more than 1"))
        last = found["passes"][-1]
        over = last["graphs_over_one"]
        lines.append(
            _verdict(f"{where}: {last['nodes']} nodes in {over:.2f}× one", over <= 1.15, "1.15")
        )
        worst = max((row["overhead"] for row in found["assumed"]), default=None)
        if worst is not None:
            lines.append(_verdict(f"{where}: overhead {worst:.1f} % of a round", worst <= 5, "5"))
    return lines


def _verdict(found: str, good: bool, wanted: str) -> str:
    return f"{'yes' if good else 'NO '} {found} (wanted: {wanted})"
