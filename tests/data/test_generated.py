import ast
import builtins
import hashlib
import itertools
import symtable

import pytest

from falcon_lab.data.generated.corpus import (
    classes,
    generate_module,
    generate_modules,
    module_seed,
    numbers,
    programs,
    tables,
)
from falcon_lab.data.generated.vocabulary import Draw, Scope
from falcon_lab.errors import FalconLabError

MODULES = list(generate_modules("train", 300))


def run(text: str) -> dict[str, object]:
    namespace: dict[str, object] = {"__name__": "generated"}
    exec(compile(text, "generated", "exec"), namespace)
    return namespace


def globals_read(table: symtable.SymbolTable) -> set[str]:
    names = {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
    return names.union(*(globals_read(child) for child in table.get_children()))


def test_every_module_runs_without_a_side_effect(capsys: pytest.CaptureFixture[str]) -> None:
    for text in MODULES:
        run(text)
    assert capsys.readouterr() == ("", "")


def test_every_name_that_a_module_reads_is_defined_in_it() -> None:
    for text in MODULES:
        table = symtable.symtable(text, "generated", "exec")
        defined = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
        missing = globals_read(table) - defined - set(dir(builtins)) - {"__name__"}
        assert not missing, f"{missing} in\n{text}"


def test_every_import_is_used() -> None:
    for text in MODULES:
        tree = ast.parse(text)
        imported = {
            alias.name
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert imported <= used, text


def test_the_tests_in_the_modules_pass() -> None:
    passed = 0
    for text in MODULES:
        for name, value in run(text).items():
            if name.startswith("test_"):
                assert callable(value)
                value()
                passed += 1
    assert passed > 60


def test_modules_have_three_to_seven_parts_in_the_agreed_length() -> None:
    for text in MODULES:
        assert 3 <= len(text.split("\n\n\n")) <= 9
        assert 300 <= len(text) <= 1000


def test_a_seed_gives_one_text_for_ever() -> None:
    digest = hashlib.sha256("".join(MODULES[:50]).encode()).hexdigest()
    assert digest[:16] == "1cfedf9565de0b1e"


def test_splits_and_seeds_share_no_document() -> None:
    train = set(generate_modules("train", 2000))
    assert len(train) == 2000
    assert train.isdisjoint(generate_modules("validation", 300))
    assert train.isdisjoint(generate_modules("heldout", 300))
    assert train.isdisjoint(generate_modules("train", 300, seed=1))


def test_module_seeds_of_different_splits_never_meet() -> None:
    last = 2**32 - 1
    ends = [(module_seed(s, 0, n), module_seed(s, last, n)) for n in range(3) for s in SPLITS]
    assert all(low <= high for low, high in ends)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ends))
    with pytest.raises(ValueError, match="4294967296 documents"):
        module_seed("train", 2**32)


SPLITS = ("train", "validation", "heldout")


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(FalconLabError, match="no split 'test'"):
        next(generate_modules("test", 1))
    with pytest.raises(FalconLabError, match="must not be negative"):
        next(generate_modules("train", 1, seed=-1))


ALL = [
    *numbers.TEMPLATES,
    *tables.CONSTANTS,
    *tables.TEMPLATES,
    *classes.TEMPLATES,
    *programs.TEMPLATES,
    *programs.ENDINGS,
]


def test_there_are_twenty_templates_and_more_and_each_of_them_varies() -> None:
    assert len(set(ALL)) >= 25
    for template in set(numbers.TEMPLATES) | set(tables.TEMPLATES) | set(classes.TEMPLATES):
        texts = {template(Scope(Draw(seed))) for seed in range(40)}
        assert len(texts) >= 20, template.__name__


def test_a_name_is_defined_once() -> None:
    for text in MODULES:
        names = [
            node.name
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        ]
        assert len(names) == len(set(names)), text


def test_a_definition_that_does_not_fit_leaves_no_trace() -> None:
    scope = Scope(Draw(0))
    before = scope.snapshot()
    assert programs.batches(scope) is not None
    assert scope.snapshot() != before
    scope.restore(before)
    assert scope.snapshot() == before
    assert scope.imports == []


def test_the_same_seed_repeats_and_neighbours_differ() -> None:
    assert generate_module(7) == generate_module(7)
    assert generate_module(7) != generate_module(8)
