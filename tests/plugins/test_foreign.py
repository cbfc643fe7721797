from __future__ import annotations

import json

import pytest

from falcon_lab.errors import FalconLabError, PluginWarning
from falcon_lab.plugins import foreign
from falcon_lab.plugins.foreign import PluginError, foreign_code, said
from installing import Site
from running import invoke

OWNER, DOING = "theirs 1.0 (entry point t)", "building drafter 'x'"
GOOD = "from falcon_lab import hookimpl\n@hookimpl\ndef register_components(register): pass\n"


def out_of(error: BaseException) -> BaseException:
    """What comes out of a plug-in's code that raises an error."""
    with pytest.raises(BaseException) as caught, foreign_code(OWNER, DOING):  # noqa: PT011
        exec("raise error", {"__name__": "theirs", "error": error})
    return caught.value


def test_whatever_it_raises_is_put_down_to_it_with_the_original_behind() -> None:
    for error in (KeyError("k"), SystemExit(0), type("Own", (BaseException,), {})("k")):
        found = out_of(error)
        assert isinstance(found, PluginError)
        assert found.__cause__ is error
        assert str(found).startswith(f"{OWNER}: {DOING} raised {said(error)}")


def test_its_own_word_to_the_user_and_ctrl_c_are_handed_on() -> None:
    refusal = FalconLabError("no such model")
    assert out_of(refusal) is refusal
    with pytest.warns(PluginWarning, match=r"theirs 1\.0 .* was interrupted"):
        assert isinstance(out_of(KeyboardInterrupt()), KeyboardInterrupt)


def test_an_error_is_shown_in_one_short_line_of_printable_characters() -> None:
    assert said(ValueError("a\n\tb\x1b[2J")) == "ValueError: a b [2J"
    assert said(ValueError()) == "ValueError"
    assert len(said(ValueError("x" * 10**6))) < 400


def test_a_plug_in_that_takes_long_is_named_with_how_to_do_without_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "PATIENCE", 0.02)
    site.install("falcon-lab-quick", GOOD)
    site.install("falcon-lab-slow", f"import time\ntime.sleep(0.3)\n{GOOD}")
    heard = invoke("plugins", "--json")
    assert heard.exit_code == 0
    assert json.loads(heard.stdout)["failures"] == []
    [line] = [line for line in heard.stderr.splitlines() if "takes long" in line]
    assert "falcon-lab-slow 0.1" in line
    assert "FALCON_LAB_PLUGINS=falcon-lab-quick leaves it out" in line


def test_a_signal_ends_the_command_while_a_plug_in_is_imported_and_says_which(site: Site) -> None:
    ending = "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(5)\n"
    site.install("falcon-lab-slow", ending + GOOD)
    ended = invoke("plugins")
    assert ended.exit_code == 143
    assert "falcon-lab-slow 0.1 (entry point falcon_lab_slow): importing" in ended.stderr
    assert "ended by SIGTERM" in ended.stderr


def test_a_plug_in_that_pretends_to_be_ctrl_c_is_left_out_like_any_other(site: Site) -> None:
    site.install("falcon-lab-sly", "raise KeyboardInterrupt")
    listed = invoke("plugins")
    assert listed.exit_code == 0
    assert "falcon-lab-sly 0.1 did not load: KeyboardInterrupt" in listed.stderr


def test_what_a_plug_in_writes_to_the_descriptor_of_stdout_goes_to_that_of_stderr(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    site.install(
        "falcon-lab-loud", f"import os\nos.write(1, b'one')\nos.system('echo two')\n{GOOD}"
    )
    assert invoke("plugins", "--json").exit_code == 0
    heard = capfd.readouterr()
    assert heard.out == ""
    assert heard.err.split() == ["onetwo"]
