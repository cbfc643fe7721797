from itertools import islice

from falcon_lab.data.corpora import corpus
from falcon_lab.data.heldout import PER_FILE, beginnings, heldout_functions

SOURCE = '''
import os

@os.cache
def documented(a,
               b):
    """Say what.

    And more.
    """
    return a + b

def bare(a):
    return a

def nothing_else():
    """Only a docstring."""

class Thing:
    async def method(self):
        """Do it."""
        def inner():
            """Hidden."""
            return 1
        return inner
'''


def test_a_function_begins_at_def_and_ends_with_its_docstring() -> None:
    found = dict(beginnings("a.py", SOURCE, seed=0))
    assert found == {
        "a.py:documented": 'def documented(a,\n               b):\n    """Say what.\n\n'
        '    And more.\n    """\n',
        "a.py:Thing.method": 'async def method(self):\n    """Do it."""\n',
    }


def test_a_file_that_does_not_parse_gives_nothing() -> None:
    assert beginnings("a.py", "def f(:\n", seed=0) == []


def test_the_seed_chooses_among_the_functions_of_a_file() -> None:
    source = "".join(f'def f{n}():\n    """Doc."""\n    return {n}\n' for n in range(30))
    chosen = [beginnings("a.py", source, seed=seed) for seed in (0, 0, 1)]
    assert len(chosen[0]) == PER_FILE
    assert chosen[0] == chosen[1] != chosen[2]


def test_functions_come_from_held_out_files_alone_and_from_many_of_them() -> None:
    heldout = {document.id for document in corpus("stdlib", split="heldout")}
    files = [name.rpartition(":")[0] for name, _ in islice(heldout_functions(0), 10)]
    assert set(files) <= heldout
    assert len(set(files)) == 10
