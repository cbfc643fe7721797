"""An error of a component at work is named by the plug-in whose code or objects it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from falcon_lab.errors import FalconLabError
from falcon_lab.plugins.culprits import blame
from hostile_plug_ins import DRAFTER, hook
from installing import Site
from running import invoke
from saved_models import save_models

WHOSE = "drafter 'head' of falcon-lab-theirs 0.1"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALCON_LAB_PLUGINS", "")
        return save_models(tmp_path_factory.mktemp("models")) / "target"


def theirs(body: str) -> str:
    """A module with a drafter ``head``, which does something when it drafts, and another one."""
    return hook(
        "register.drafter('other', 'builtins:print')\n"
        "    register.drafter('head', 'falcon_lab_theirs:Head')",
        DRAFTER.replace("frontier): pass", f"frontier):\n        {body}"),
    )


def drafting(site: Site, target: Path, body: str) -> tuple[int, str, BaseException | None]:
    """Exit code, stderr and exception of a command whose drafter does something."""
    site.install("falcon-lab-theirs", theirs(body))
    done = invoke("generate", "--target", target, "--prompt", "a", "drafter.name=head")
    return done.exit_code, done.stderr, done.exception


def test_a_bug_of_a_component_is_named_below_its_traceback(site: Site, target: Path) -> None:
    code, _, error = drafting(site, target, "raise KeyError('bug')")
    assert code == 1
    assert isinstance(error, KeyError)
    [note] = error.__notes__
    assert f"KeyError: 'bug': raised inside {WHOSE}" in note
    assert "falcon_lab_theirs.py, line " in note


def test_what_a_component_gave_is_named_where_our_code_fails_over_it(
    site: Site, target: Path
) -> None:
    code, _, error = drafting(site, target, "return None")
    assert code == 1
    assert isinstance(error, AttributeError)
    [note] = error.__notes__
    assert f"raised over {WHOSE}" in note


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise SystemExit(0)", "SystemExit: 0: raised inside"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: raised inside"),
        ("open('/no/such/file')", "FileNotFoundError"),
        ("from falcon_lab.errors import FalconLabError as E; raise E('no luck')", "no luck"),
    ],
)
def test_leaving_and_refusing_are_no_bugs_and_no_success(
    site: Site, target: Path, body: str, reason: str
) -> None:
    code, heard, _ = drafting(site, target, body)
    assert code == 2
    [line] = [line for line in heard.splitlines() if line.startswith("falcon-lab: ")]
    assert reason in line
    assert WHOSE in line


def test_an_error_that_no_plug_in_took_part_in_is_nobodys(site: Site) -> None:
    site.install("falcon-lab-theirs", theirs("pass"))
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    assert blame(caught.value) is None
    with pytest.raises(FalconLabError) as refused:
        raise FalconLabError("mend it")
    assert blame(refused.value) is None
