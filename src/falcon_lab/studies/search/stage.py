"""Search for options of a method, and keep every attempt in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from falcon_lab.bars import Bar
from falcon_lab.config.schema import Experiment
from falcon_lab.errors import FalconLabError, did_you_mean
from falcon_lab.files import append_line, locked, make_folder, read_lines, write_atomically
from falcon_lab.measure.engines import Setup
from falcon_lab.plugins.discovery import load_components
from falcon_lab.stored import fitting
from falcon_lab.studies.search.optimiser import Optimiser, check_installed
from falcon_lab.studies.search.scoring import Attempt, Scorer
from falcon_lab.studies.search.space import Point, Space, beside, parse_space, present
from falcon_lab.timing import torch_threads

ATTEMPTS, FOUND = "search.jsonl", "searched.yaml"
"""Files of a search: every attempt, and the best options as overrides."""


@dataclass(frozen=True)
class Plan:
    """What is searched, and how.

    Attributes:
        method: of the experiment.
        over: options and what they may be, as the user wrote them.
        objective: one of ``scoring.OBJECTIVES``.
        node_cost: see ``Scorer``.
        attempts: in all.
        sampler: one of ``optimiser.SAMPLERS``.
        source: prompts, as ``evaluation.prompts.name``.
        texts: of them.
        tokens: most of an answer.
        into: folder of the two files.
    """

    method: str
    over: tuple[str, ...]
    objective: str = "speed"
    node_cost: float = 0.0
    attempts: int = 200
    sampler: str = "gp"
    source: str = "validation"
    texts: int = 4
    tokens: int = 32
    into: Path = Path("searched")


def search(experiment: Experiment, plan: Plan, announce: Callable[[str], None]) -> Attempt:
    """Search, going on where the same search has stopped; return the best attempt.

    Args:
        experiment: with the method.
        plan: what is searched.
        announce: is called with one line for the user at a time.

    Raises:
        FalconLabError: for whatever the user can mend.
    """
    check_installed()
    components = load_components()
    nodes = nodes_of(experiment, plan.method)
    space = parse_space(plan.over, nodes, components)
    setup = Setup.load(experiment, components, announce, partial(check_search, plan=plan))
    prompts = setup.other_prompts(plan.source, plan.texts, setup.prompts())
    scorer = Scorer(setup, nodes, prompts, plan.tokens, plan.objective, plan.node_cost)
    make_folder(plan.into)
    busy = f"{plan.into}: another search is using this folder"
    with locked(plan.into / ".lock", busy=busy), torch_threads(experiment.evaluation.threads):
        journal = Journal(plan.into / ATTEMPTS, _facts(setup, plan, nodes))
        optimiser = Optimiser(
            space,
            sampler=plan.sampler,
            seed=experiment.evaluation.seed,
            exact=plan.objective == "cost",
            first=present(space, nodes),
        )
        for known in journal.attempts:
            optimiser.tell(known.point, known.score)
        if journal.attempts:
            announce(f"going on behind {len(journal.attempts)} attempts of {journal.path}")
        seed = experiment.evaluation.seed
        for done in attempts(journal, optimiser, scorer, space, plan, seed):
            if done is journal.best and not done.refused:
                write_fragment(plan, nodes, journal)
        if journal.best.refused:
            raise FalconLabError(
                f"every attempt was refused, the first one: {journal.best.refused}"
            )
        write_fragment(plan, nodes, journal)  # which says of how many it is the best
        return journal.best


def check_search(setup: Setup, plan: Plan) -> None:
    """See that everything can be measured and searched with.

    Raises:
        FalconLabError: as ``Setup.check``, or the prompts to search with cannot be used.
    """
    setup.check()
    setup.other_prompts(plan.source, plan.texts, setup.prompts())


def nodes_of(experiment: Experiment, name: str) -> dict[str, dict[str, Any]]:
    """Return the nodes of a method's components.

    Raises:
        FalconLabError: there is no such method, or its drafter has to be trained.
    """
    methods = experiment.evaluation.methods
    if name not in methods:
        meant = did_you_mean(name, list(methods), all_of_them=True)
        raise FalconLabError(f"--method {name}: no such method in evaluation.methods{meant}")
    method = methods[name]
    if method.drafter is None:
        raise FalconLabError(
            f"--method {name}: searched are methods whose drafter is not trained; give it one in "
            f"evaluation.methods.{name}.drafter"
        )
    return {
        "drafter": method.drafter,
        "tree": method.tree or experiment.tree,
        "acceptance": method.acceptance or experiment.acceptance,
        "controller": method.controller or experiment.controller,
    }


def attempts(
    journal: Journal,
    optimiser: Optimiser,
    scorer: Callable[[Point], Attempt],
    space: Space,
    plan: Plan,
    seed: int,
) -> Iterator[Attempt]:
    """Yield what is tried, each noted in the journal, until there are as many as planned."""
    left = plan.attempts - len(journal.attempts)
    with Bar(total=plan.attempts, initial=plan.attempts - left, desc="search", unit="try") as bar:
        if left > 0 and plan.objective == "speed" and (first := optimiser.ask()):
            scorer(first)  # allocators and caches are then as they will be
        for number in range(plan.attempts - left, plan.attempts):
            point = optimiser.ask()
            if plan.objective == "cost":
                point = _new(point, journal, space, Random(f"{seed} {number}"))
            done = scorer(point)
            optimiser.tell(point, done.score)
            journal.add(done)
            bar.set_postfix_str(f"best {journal.best.score:.3f}")
            bar.update()
            yield done


TURNS = 100
"""Points beside a known one that are looked at for one that is new."""


def _new(point: Point, journal: Journal, space: Space, random: Random) -> Point:
    """Return the point, or one near it: of a known one with the same score nothing is learnt."""
    for _ in range(TURNS):
        if not journal.knows(point):
            break
        point = beside(space, point, random)
    return point


def _facts(setup: Setup, plan: Plan, nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides a search, beside how long it is."""
    evaluation = setup.experiment.evaluation
    decided = asdict(plan)
    for key in ("attempts", "into"):
        del decided[key]
    return {
        **decided,
        "target": setup.target.fingerprint,
        "dtype": str(setup.target.dtype),
        "nodes": dict(nodes),
        "temperature": evaluation.temperature,
        "seed": evaluation.seed,
    }


class Journal:
    """Attempts in a file of JSON lines, which begins with what decides the search.

    Args:
        path: the file.
        facts: plain values.

    Raises:
        FalconLabError: the file holds another search.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.attempts: list[Attempt] = []
        self._known: set[str] = set()
        wanted = json.loads(json.dumps(facts, sort_keys=True, default=str))
        if not path.exists():
            write_atomically(path, json.dumps({"facts": wanted}) + "\n")
            return
        lines = read_lines(path)
        there = next(lines, {}).get("facts")
        if not isinstance(there, dict) or there != wanted:
            found = there if isinstance(there, dict) else {}
            other = [key for key in wanted if found.get(key) != wanted[key]]
            raise FalconLabError(
                f"{path}: holds another search ({', '.join(other)}); choose another folder with "
                "--into, or delete it"
            )
        for line in lines:
            if (attempt := fitting(line, Attempt)) is not None:
                self._note(attempt)

    @property
    def best(self) -> Attempt:
        """Return the first of the best attempts."""
        return max(self.attempts, key=lambda attempt: attempt.score)

    def knows(self, point: Point) -> bool:
        """Whether a point was tried."""
        return _named(point) in self._known

    def add(self, attempt: Attempt) -> None:
        """Append an attempt."""
        append_line(self.path, asdict(attempt))
        self._note(attempt)

    def _note(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        self._known.add(_named(attempt.point))


def _named(point: Point) -> str:
    return json.dumps(point, sort_keys=True)


HEADER = """\
# The best of {count} attempts of falcon-lab search, by {objective}: {score:.4g},
# with {accepted:.0%} of the draft tokens accepted and {tokens:.2f} tokens a round.
#
#     lightning run EXPERIMENT.yaml {name}
"""


def write_fragment(plan: Plan, nodes: Mapping[str, Any], journal: Journal) -> Path:
    """Write the best options as a YAML of overrides, whole or not at all."""
    best = journal.best
    changed: dict[str, dict[str, Any]] = {}
    for key, value in best.point.items():
        section, _, option = key.partition(".")
        changed.setdefault(section, {"name": nodes[section]["name"]})[option] = value
    head = HEADER.format(
        count=len(journal.attempts),
        objective={"speed": "tokens a second", "cost": "tokens a decode step's work"}[
            plan.objective
        ],
        score=best.score,
        accepted=best.accepted / max(best.drafted, 1),
        tokens=best.tokens / max(best.rounds, 1),
        name=FOUND,
    )
    content = {"evaluation": {"methods": {plan.method: changed}}}
    # JSON in one line is YAML too.
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in content.items())
    return write_atomically(plan.into / FOUND, head + text)
