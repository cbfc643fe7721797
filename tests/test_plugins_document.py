"""``docs/plugins.md`` is done as it says, from its own text."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from falcon_lab.scaffolding.plugin import rendered
from falcon_lab.testing import ContractError, check_drafter
from running import ROOT, environment, run, smoke

TEXT = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
FILE = re.compile(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)

FILES = dict(FILE.findall(TEXT))
COMMANDS = [line for block in SHELL.findall(TEXT) for line in block.splitlines()]
MOST_LINES = 60


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with the document's files, and the plug-in installed for this process."""
    folder = tmp_path_factory.mktemp("document")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "my-head" / "README.md").write_text("A head.\n", encoding="utf-8")
    site = folder / "site"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(site)]
    put = [*pip, "install", *offline, str(folder / "my-head")]
    subprocess.run(put, check=True, capture_output=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALCON_LAB_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setenv("FALCON_LAB_PLUGINS", "my-head")
        patch.syspath_prepend(str(site))
        patch.chdir(folder)
        yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "my_head"]:
        del sys.modules[name]


def test_the_documents_code_is_shorter_than_it_promises() -> None:
    own = [text for name, text in FILES.items() if name.endswith(".py")]
    lines = [line for text in own for line in text.splitlines() if line.strip()]
    assert len(own) == 3
    assert len(lines) < MOST_LINES
    assert f"less than {MOST_LINES} lines" in TEXT


def test_the_command_writes_the_documents_code() -> None:
    written = rendered("my-head", "my_head", "drafter")
    shown = {name.removeprefix("my-head/"): text for name, text in FILES.items() if "/" in name}
    assert shown == {name: text for name, text in written.items() if name in shown}
    assert set(written) - set(shown) == {"README.md", "src/my_head/py.typed"}


def lists_it(text: str) -> None:
    assert re.search(r"^drafter +my-head ", run(*shlex.split(text)[1:]), re.MULTILINE)


def passes_its_test(text: str) -> None:
    words = [sys.executable, *shlex.split(text)[1:], "-q", "-p", "no:cacheprovider"]
    env = environment(PYTHONPATH="site")
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def small(*more: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        words = shlex.split(text)
        assert run(*words[1:3], *smoke(*more), *words[3:])

    return check


def whole(*more: str) -> Callable[[str], None]:
    return lambda text: check_said(run(*shlex.split(text)[1:], *more))


def check_said(printed: str) -> None:
    assert printed


def is_written(text: str) -> None:
    """As ``test_the_command_writes_the_documents_code``; here its files are there already."""
    assert text == "falcon-lab new-plugin my-head"


def is_installed(text: str) -> None:
    assert text == "pip install -e ./my-head"


CHECKS: dict[str, Callable[[str], None]] = {
    "falcon-lab new-plugin my-head": is_written,
    "pip install -e ./my-head": is_installed,
    "falcon-lab plugins --strict": lists_it,
    "python -m pytest my-head/tests": passes_its_test,
    "falcon-lab run my-head.yaml": small(),
    "falcon-lab evaluate runs/my-head evaluation.temperature=1": whole(
        "evaluation.max_new_tokens=4"
    ),
    "falcon-lab check --drafter runs/my-head/drafter --tree dynamic": whole(
        "--prompts=1", "--samples=20", "evaluation.max_new_tokens=8"
    ),
    "falcon-lab tune runs/my-head/drafter": whole(
        *("--texts=4", "--nodes=4", "--depth=4", "--tree=chain", "--max-new-tokens=24"),
        *("evaluation.prompts.limit=1", "evaluation.repeats=1"),
    ),
    "falcon-lab compare heads.yaml": small(
        *("seeds=[0]", "budgets=[chain-2]", "temperatures=[0]", "tuning.grid=[chain-2]"),
    ),
}


@pytest.mark.slow
def test_the_document_can_be_followed_from_its_first_command_to_its_last(place: Path) -> None:
    assert list(CHECKS) == COMMANDS
    for text, check in CHECKS.items():
        check(text)
    assert (place / "runs/my-head/drafter/model.safetensors").exists()


def test_what_the_check_says_of_a_shifted_label_is_what_the_document_says(place: Path) -> None:
    from dataclasses import replace

    from my_head import HeadConfig
    from my_head.drafter import Head

    class Shifted(Head):
        def forward(self, *given: object) -> object:
            found = super().forward(*given)
            return replace(found, label=found.label + 1)

    with pytest.raises(ContractError) as caught:
        check_drafter(lambda context: Shifted(HeadConfig(16), context))
    said = str(caught.value).split(": ", 1)[1]
    assert f"drafter 'my-head': {said}" in TEXT


def test_every_kind_of_the_table_can_be_written_and_checked() -> None:
    from falcon_lab import testing
    from falcon_lab.scaffolding.plugin import KINDS

    rows = re.findall(r"^\| `([\w-]+)` \| `register\.(\w+)` \| `(\w+)` \|", TEXT, re.MULTILINE)
    assert {row[0]: row[1:] for row in rows} == {
        kind: (about.kind, about.check) for kind, about in KINDS.items()
    }
    assert all(hasattr(testing, check) for _, _, check in rows)


def test_readme_and_contributing_lead_to_the_document() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "docs/architecture.md"):
        assert "plugins.md" in (ROOT / name).read_text(encoding="utf-8"), name
