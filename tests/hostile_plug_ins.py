"""Plug-ins that do what a plug-in must not, as data: their source, and what is to be said of them.

Each is the distribution ``hostile`` 6.6 with the entry point ``hostile``; where it registers
something, that is a component ``bad``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HEAD = """
import os, sys, signal, warnings, logging
from dataclasses import dataclass, field
from typing import Any
from falcon_lab import hookimpl
"""

HOOK = """
@hookimpl
def register_components(register):
    {body}
"""

DRAFTER = """
class Head:
    block = 1
    needs = frozenset()
    def __init__(self, config, context): pass
    def reset(self, first): pass
    def observe(self, observation): pass
    def draft(self, frontier): pass
"""


def hook(body: str, before: str = "") -> str:
    """A module with a hook."""
    return HEAD + before + HOOK.format(body=body)


def drafter(build: str, before: str = "") -> str:
    """A module that registers a drafter ``bad``, which is built by what is given."""
    return hook(f"register.drafter('bad', {build})", DRAFTER + before)


def options(fields: str, before: str = "") -> str:
    """A module that registers a drafter ``bad`` with options."""
    lines = "\n".join(f"    {line}" for line in fields.splitlines())
    config = f"{before}\n@dataclass\nclass Options:\n{lines}\n"
    return hook("register.drafter('bad', Head, config=Options)", DRAFTER + config)


def building(body: str) -> str:
    """A module whose builder of the drafter ``bad`` does something."""
    return drafter("build", f"\ndef build(config, context):\n    {body}\n")


@dataclass(frozen=True)
class Hostile:
    """A plug-in.

    Attributes:
        name: what it does.
        source: its module's.
        said: what of it is named where it matters.
        used: overrides that use it.
        entry_points: of the distribution; None: as they should be.
        also: other modules of it, by name.
    """

    name: str
    source: str
    said: str
    used: tuple[str, ...] = ("drafter.name=bad",)
    entry_points: str | None = None
    also: dict[str, str] = field(default_factory=dict)


NEVER_LOADS = [
    Hostile("misses a library", "import does_not_exist", "No module named 'does_not_exist'"),
    Hostile("has a syntax error", "def (", "SyntaxError"),
    Hostile("holds a NUL", "x = 1\0", "null bytes"),
    Hostile("raises on import", "raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    Hostile("leaves with 0", "raise SystemExit(0)", "SystemExit: 0"),
    Hostile("leaves by sys.exit", "import sys\nsys.exit('bye')", "SystemExit: bye"),
    Hostile(
        "has an exception of its own", "class Own(BaseException): pass\nraise Own(3)", "Own: 3"
    ),
    Hostile("recurses for ever", "def f(): f()\nf()", "RecursionError"),
    Hostile("runs out of memory", "raise MemoryError", "MemoryError"),
    Hostile("closes generators", "raise GeneratorExit", "GeneratorExit"),
    Hostile(
        "raises what cannot be shown",
        "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd",
        "Odd: (its message cannot be shown)",
    ),
    Hostile("says a million things", "raise ValueError('ab\\x1b[2J\\n' * 10**6)", "ValueError: ab"),
    Hostile("has no hook", "x = 1", "it has no @hookimpl function"),
    Hostile(
        "misspells the hook", hook("pass").replace("register_comp", "registre_comp"), "unknown hook"
    ),
    Hostile("asks for more", hook("pass").replace("(register)", "(a, b)"), "PluginValidationError"),
    Hostile("registers no such kind", hook("register.draftr('bad', 1)"), "'draftr'"),
    Hostile("forgets an argument", hook("register.drafter('bad')"), "TypeError"),
    Hostile("raises in the hook", hook("raise KeyError('a')"), "KeyError: 'a'"),
    Hostile("leaves in the hook", hook("sys.exit(0)"), "SystemExit: 0"),
    Hostile("yields in the hook", hook("yield register"), "never runs"),
    Hostile("waits in the hook", hook("pass").replace("def reg", "async def reg"), "never runs"),
    Hostile("has a number as name", hook("register.drafter(3, print)"), "drafter name 3"),
    Hostile("has no name", hook("register.drafter('', print)"), "drafter name ''"),
    Hostile("has a path as name", hook("register.drafter('../x', print)"), "drafter name '../x'"),
    Hostile("has a long name", hook("register.drafter('a' * 300, print)"), "at most"),
    Hostile("has odd options", hook("register.drafter('bad', print, config={})"), "a dataclass"),
    Hostile(
        "has a class of options", hook("register.drafter('bad', print, config=int)"), "dataclass"
    ),
    Hostile("builds by nothing", hook("register.drafter('bad', None)"), "build must be callable"),
    Hostile("builds by a number", hook("register.drafter('bad', 5)"), "build must be callable"),
    Hostile("builds by a sentence", hook("register.drafter('bad', 'a b')"), "build must be"),
    Hostile(
        "registers twice",
        hook("register.drafter('bad', print); register.drafter('bad', print)"),
        "registered twice",
    ),
    Hostile("is not there", "", "No module named 'nowhere'", entry_points="hostile = nowhere"),
    Hostile("names no such part", "", "AttributeError", entry_points="hostile = {module}:x.y"),
    Hostile("names no module", "", "names no module", entry_points="hostile = not a module!"),
    Hostile(
        "deletes where it is",
        "import os, tempfile\nd = tempfile.mkdtemp()\nos.chdir(d)\nos.rmdir(d)\nos.getcwd()",
        "FileNotFoundError",
    ),
]
"""Plug-ins of which nothing can be used."""

UNUSABLE_OPTIONS = [
    Hostile(
        "makes defaults that raise",
        options("x: list = field(default_factory=make)", "def make(): raise RuntimeError('no')"),
        "RuntimeError: no",
    ),
    Hostile(
        "makes defaults that leave",
        options("x: list = field(default_factory=make)", "def make(): sys.exit(0)"),
        "SystemExit: 0",
    ),
    Hostile(
        "makes endless defaults",
        options(
            "x: Any = field(default_factory=make)", "def make():\n    a = []; a.append(a); return a"
        ),
        "hostile 6.6",
    ),
    Hostile(
        "has defaults that cannot be shown",
        options(
            "x: Any = field(default_factory=Odd)",
            "class Odd:\n    def __str__(self): raise KeyError('odd')\n    __repr__ = __str__",
        ),
        "hostile 6.6",
    ),
    Hostile("has unknown types", options("x: 'Nowhere' = 1"), "Nowhere"),
    Hostile("has types of its own", options("x: 'Head' = None"), "hostile 6.6"),
    Hostile("has complex numbers", options("x: complex = 1j"), "hostile 6.6"),
    Hostile("has an option called name", options("name: str = 'x'"), "name"),
]
"""Plug-ins whose component is listed among what did not load."""

WRONG_OPTIONS = [
    Hostile(
        "raises behind its options",
        options("x: int = 1\ndef __post_init__(self): raise RuntimeError('no')"),
        "RuntimeError: no",
    ),
    Hostile(
        "leaves behind its options",
        options("x: int = 1\ndef __post_init__(self): sys.exit(0)"),
        "SystemExit: 0",
    ),
    Hostile(
        "recurses behind its options",
        options("x: int = 1\ndef __post_init__(self): self.__post_init__()"),
        "RecursionError",
    ),
    Hostile(
        "refuses every value",
        options("x: int = 1\ndef __post_init__(self): raise ValueError('never enough')"),
        "never enough",
    ),
    Hostile(
        "contains itself",
        options(
            "x: Any = field(default_factory=make, metadata={'component': 'drafter'})",
            "def make(): return {'name': 'bad'}",
        ),
        "never end",
    ),
    Hostile(
        "contains a word",
        options("x: Any = field(default='falcon', metadata={'component': 'drafter'})"),
        "'falcon'",
    ),
    Hostile(
        "takes no options",
        options("x: int = 1\ndef __init__(self): pass"),
        "hostile 6.6",
    ),
]
"""Plug-ins whose options are refused whatever they are."""

WRONG_BUILDERS = [
    Hostile("raises while building", building("raise KeyError('bug')"), "KeyError: 'bug'"),
    Hostile("leaves while building", building("raise SystemExit(0)"), "SystemExit: 0"),
    Hostile("refuses to be built", building("raise ValueError('not today')"), "not today"),
    Hostile(
        "says nothing",
        building("from falcon_lab.errors import FalconLabError; raise FalconLabError('')"),
        "hostile/bad",
    ),
    Hostile("recurses while building", building("return build(config, context)"), "RecursionError"),
    Hostile("needs the system", building("return open('/no/such/file')"), "FileNotFoundError"),
    Hostile("builds nothing", building("return None"), "NoneType"),
    Hostile("builds a number", building("return 3"), "is a int"),
    Hostile("builds a text", building("return 'head'"), "is a str"),
    Hostile("builds a class", building("return Head"), "the class Head itself"),
    Hostile("builds a function", building("return build"), "is a function"),
    Hostile("builds a generator", building("yield Head(config, context)"), "is a generator"),
    Hostile("builds a module", building("return os"), "hostile/bad"),
    Hostile(
        "builds another kind",
        building("from falcon_lab.controllers import Fixed; return Fixed(config, context)"),
        "hostile",
    ),
    Hostile(
        "builds what waits", building("pass").replace("def build", "async def build"), "a coroutine"
    ),
    Hostile(
        "builds half a drafter", building("del Head.draft; return Head(config, context)"), "draft"
    ),
    Hostile(
        "builds a drafter with a word for k",
        building("Head.block = 'two'; return Head(config, context)"),
        "block='two'",
    ),
    Hostile(
        "builds a drafter with no tokens",
        building("Head.block = 0; return Head(config, context)"),
        "block=0",
    ),
    Hostile(
        "builds a drafter that cannot draft",
        building("Head.draft = 5; return Head(config, context)"),
        "draft=5",
    ),
    Hostile(
        "builds a drafter without k",
        building("del Head.block; return Head(config, context)"),
        "block",
    ),
    Hostile(
        "raises when it is looked at",
        building("Head.block = property(lambda self: 1 / 0); return Head(config, context)"),
        "ZeroDivisionError",
    ),
    Hostile(
        "has a class that cannot be changed",
        building("Head.__slots__ = (); return type('T', (tuple,), {'__slots__': ()})()"),
        "hostile/bad",
    ),
    Hostile(
        "speaks an earlier version's words",
        drafter("Head", "Head.probe = Head.harvest = lambda *a: None; Head.max_probes = 3\n"),
        "harvest is observe_auxiliary now",
    ),
    Hostile("takes nothing", building("pass").replace("(config, context)", "()"), "TypeError"),
    Hostile("builds by a text", drafter("'os:path.sep'"), "is a str, and no builder"),
    Hostile("builds by nobody", drafter("'nowhere:build'"), "No module named 'nowhere'"),
    Hostile("builds by what is missing", drafter("'os:nothing'"), "os:nothing"),
    Hostile("builds by dots", drafter("'os..path:x'"), "os..path:x"),
    Hostile(
        "builds by a module that leaves",
        drafter("'hostile_more:build'"),
        "SystemExit: 0",
        also={"hostile_more": "raise SystemExit(0)"},
    ),
    Hostile(
        "builds by a broken module",
        drafter("'hostile_more:build'"),
        "SyntaxError",
        also={"hostile_more": "def ("},
    ),
    Hostile(
        "controls nothing",
        hook("register.controller('bad', lambda *a: None)"),
        "NoneType",
        ("controller.name=bad",),
    ),
    Hostile(
        "accepts nothing",
        hook("register.acceptance_rule('bad', lambda *a: True)"),
        "bool",
        ("acceptance.name=bad",),
    ),
    Hostile(
        "grows nothing",
        hook("register.tree_builder('bad', lambda *a: [])"),
        "list",
        ("tree.name=bad",),
    ),
    Hostile(
        "draws nothing",
        hook("register.template('bad', lambda *a: None)"),
        "NoneType",
        ("tree.name=static", "tree.template=bad"),
    ),
    Hostile(
        "draws one line after the other",
        hook("register.template('bad', lambda *a: (x for x in '01'))"),
        "generator",
        ("tree.name=static", "tree.template=bad"),
    ),
    Hostile(
        "draws numbers",
        hook("register.template('bad', lambda *a: {1: None, None: 'x'})"),
        "tree template 'bad'",
        ("tree.name=static", "tree.template=bad"),
    ),
]
"""Plug-ins that are found out when a component is built."""

MEDDLES = [
    Hostile("goes elsewhere", HEAD + "os.chdir('/')" + hook("pass"), "the working directory"),
    Hostile("takes stdout", HEAD + "sys.stdout = sys.stderr" + hook("pass"), "sys.stdout"),
    Hostile("takes stderr away", HEAD + "sys.stderr = None" + hook("pass"), "sys.stderr"),
    Hostile("takes the arguments", HEAD + "sys.path.clear()" + hook("pass"), "sys.path"),
    Hostile("takes the variables", HEAD + "os.environ.clear()" + hook("pass"), "PATH"),
    Hostile(
        "allows itself",
        HEAD + "os.environ['FALCON_LAB_PLUGINS'] = ''" + hook("pass"),
        "FALCON_LAB_PLUGINS",
    ),
    Hostile("takes Ctrl-C", HEAD + "signal.signal(signal.SIGINT, print)" + hook("pass"), "SIGINT"),
    Hostile("takes SIGTERM", HEAD + "signal.signal(15, signal.SIG_IGN)" + hook("pass"), "SIGTERM"),
    Hostile("silences logs", HEAD + "logging.disable(50)" + hook("pass"), "logging"),
    Hostile(
        "makes errors of warnings", hook("warnings.simplefilter('error')"), "filters of warnings"
    ),
    Hostile("forgets filters", hook("warnings.resetwarnings()"), "filters of warnings"),
    Hostile("takes warnings", hook("logging.captureWarnings(True)"), "warnings.showwarning"),
    Hostile("watches", hook("sys.setprofile(lambda *a: None)"), "sys.setprofile"),
    Hostile("keeps garbage", hook("import gc; gc.disable()"), "gc"),
    Hostile("is shallow", hook("sys.setrecursionlimit(200)"), "limit of recursion"),
    Hostile("takes tracebacks", hook("sys.excepthook = print"), "sys.excepthook"),
    Hostile(
        "computes in doubles",
        hook("import torch; torch.set_default_dtype(torch.float64)"),
        "torch's default dtype",
    ),
    Hostile("wants no gradients", hook("import torch; torch.set_grad_enabled(False)"), "grad mode"),
    Hostile("sows", hook("import torch; torch.manual_seed(666)"), "torch's seed"),
    Hostile(
        "takes built-in names",
        hook("[register.drafter('falcon', print), register.tree_builder('static', print)]"),
        "hostile/falcon",
    ),
]
"""Plug-ins that load, and change what is not theirs."""

TALKS = [
    Hostile("prints", HEAD + "print('{ hello')" + hook("print('again')"), "hello"),
    Hostile("writes bytes", HEAD + "sys.stdout.buffer.write(b'hello')" + hook("pass"), "hello"),
    Hostile("closes stderr", HEAD + "print('hello'); sys.stderr.close()" + hook("pass"), "hello"),
    Hostile(
        "closes both", HEAD + "print('hello'); os.close(1); os.close(2)" + hook("pass"), "hello"
    ),
    Hostile("closes stdout", HEAD + "print('hello'); sys.stdout.close()" + hook("pass"), "hello"),
    Hostile(
        "wraps stdout",
        HEAD
        + "import io\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint('hello')"
        + hook("pass"),
        "hello",
    ),
]
"""Plug-ins that print where a command's own output goes."""
