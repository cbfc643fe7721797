"""Loggers and Weights & Biases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import wandb

from falcon_lab.config.schema import WandbConfig
from falcon_lab.errors import FalconLabError
from falcon_lab.history import read_history
from falcon_lab.measure.measurement import Measurement
from falcon_lab.measure.results import build_results
from falcon_lab.report.tracking import (
    Tracking,
    check_tracking,
    decode_metrics,
    run_id,
    start_tracking,
)
from falcon_lab.report.tree_drawing import draw_svg, draw_text
from measuring import EXPERIMENT, HEADER, TARGET, TREE, measurement


@pytest.fixture(autouse=True)
def _nothing_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for place in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{place}_DIR", str(tmp_path / "wandb-home"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def results(**changes: Any) -> dict[str, Any]:
    return build_results(
        measurement(3, **changes), experiment=EXPERIMENT, target=TARGET, header=HEADER
    )


@pytest.mark.parametrize(("key", "refused"), [("", True), ("a" * 40, False), ("short", True)])
def test_going_online_without_a_login_is_refused_before_a_run(
    key: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", key)
    if not key:
        monkeypatch.delenv("WANDB_API_KEY")
    wandb.teardown()
    with pytest.raises(FalconLabError, match="wandb login") if refused else nullcontext():
        check_tracking(WandbConfig())
    wandb.teardown()


def test_a_run_keeps_its_id(tmp_path: Path) -> None:
    chosen = run_id(tmp_path, {})
    assert run_id(tmp_path, {}) == chosen
    assert run_id(tmp_path / "other", {}) != chosen
    assert run_id(tmp_path, {"WANDB_RUN_ID": "given"}) == "given"
    assert run_id(tmp_path, {}) == "given"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a b\nc", b"../x", b"x" * 500])
def test_a_damaged_id_is_replaced_by_a_new_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "wandb-run-id").write_bytes(content)
    chosen = run_id(tmp_path, {})
    assert len(chosen) == 8
    assert run_id(tmp_path, {}) == chosen


def test_an_offline_run_holds_the_tables_and_goes_on_as_itself(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "csgd"  # which nobody has made yet
    config = WandbConfig(tags=["a"])
    first = start_tracking(folder, config, EXPERIMENT)
    assert first.mode == "offline"
    for logger in first.loggers:
        logger.log_metrics({"train/loss": 2.0}, step=1)
    run = first.wandb.experiment
    assert (run.id, run.group, run.job_type, run.tags) == (run_id(folder), "csgd", "train", ("a",))
    assert run.config["drafter"] == {"name": "falcon", "block": 2}
    offline = first.offline_folder
    assert offline is not None
    assert offline.is_relative_to(folder)
    first.log_results(results(), [TREE])
    assert run.summary["decode/passes"] == pytest.approx(
        results()["methods"]["tree"]["passes_per_round"]
    )
    first.log_drafter(folder, head="falcon", target="tiny-code", metadata={})  # online alone
    first.finish()
    assert read_history(first.history) == [{"step": 1, "train/loss": 2.0}]

    media = offline / "files" / "media"
    [requests] = media.glob("table/decode/requests_*.json")
    table = json.loads(requests.read_text())
    assert len(table["data"]) == 3 * 4
    assert table["columns"][:3] == ["prompt", "category", "method"]
    [trees] = media.glob("table/decode/trees_*.json")
    [drawn] = json.loads(trees.read_text())["data"]
    assert drawn[:4] == ["heldout/0", "tree", 7, 4]
    assert drawn[4] == draw_text(TREE)
    [picture] = media.glob("html/decode/*.html")
    assert draw_svg(TREE) in picture.read_text(encoding="utf-8")

    again = start_tracking(folder, config, EXPERIMENT, job_type="bench")
    assert again.wandb.experiment.id == run.id
    assert again.offline_folder != offline
    again.finish()


def test_disabled_leaves_the_history_alone(tmp_path: Path) -> None:
    found = start_tracking(tmp_path, WandbConfig(mode="disabled"), EXPERIMENT)
    assert len(found.loggers) == 1
    assert found.wandb is found.offline_folder is None
    found.log_results({}, [])
    found.log_drafter(tmp_path, head="h", target="t", metadata={})
    found.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no space\nleft")

    monkeypatch.setattr(wandb, "init", fail)
    return None


@pytest.mark.usefixtures("broken")
def test_a_failure_of_wandb_offline_is_shown_and_the_run_goes_on(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="W&B failed and is left out.*RuntimeError: no space left"):
        found = start_tracking(tmp_path, WandbConfig(), EXPERIMENT)
    assert (found.mode, len(found.loggers)) == ("disabled", 1)


@pytest.mark.usefixtures("broken")
def test_a_failure_of_wandb_online_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FalconLabError, match=r"no space left.*wandb login.*WANDB_MODE=offline"):
        start_tracking(tmp_path, WandbConfig(mode="online"), EXPERIMENT)


class Stub:
    """A WandbLogger whose run fails, or takes what it is given."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.artifacts: list[tuple[Any, list[str]]] = []
        self.logged: dict[str, Any] = {}
        self.experiment = self

    def log(self, values: dict[str, Any]) -> None:
        if self.fails:
            raise OSError("disk full")
        self.logged = values

    def finish(self, exit_code: int = 0) -> None:
        self.log({})

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        self.artifacts.append((artifact, aliases))


def test_results_that_wandb_cannot_take_offline_do_not_end_the_run(tmp_path: Path) -> None:
    stub = Stub(fails=True)
    found = Tracking([stub], tmp_path / "history.jsonl", "offline", stub)
    with pytest.warns(UserWarning, match="disk full"):
        found.log_results(results(), [])
    assert found.wandb is None
    assert found.loggers == []
    found.finish()
    online = Tracking([], tmp_path / "history.jsonl", "online", Stub(fails=True))
    with pytest.raises(OSError, match="disk full"):
        online.log_results(results(), [])


def test_the_drafter_is_an_artifact_when_online(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    stub = Stub()
    found = Tracking([], tmp_path / "history.jsonl", "online", stub)
    found.log_drafter(tmp_path, head="falcon", target="acme/tiny", metadata={"step": 5})
    [(artifact, aliases)] = stub.artifacts
    assert (artifact.name, artifact.type) == ("drafter-falcon-acme-tiny", "model")
    assert artifact.metadata == {"step": 5}
    assert "config.json" in artifact.manifest.entries
    assert aliases == ["last"]


def test_the_headline_method_gives_the_metrics_that_people_look_for() -> None:
    found = results()
    metrics, tree = decode_metrics(found), found["methods"]["tree"]
    assert metrics["decode/mean_accepted"] == tree["tau"]
    assert metrics["decode/speedup"] == tree["speedup"]["ratio"]
    assert metrics["decode/acceptance_at_position_2"] == tree["acceptance"][1]
    assert metrics["decode/lossless"] == 1.0
    assert metrics["decode/chain/mean_accepted"] == found["methods"]["chain"]["tau"]
    assert metrics["decode/HF_generate/tokens_per_second"] > 0
    # One round verifies once: the time of all verifications over the number of rounds.
    verify = sum(
        t["times"]["verify"] for r in found["rows"] if r["method"] == "tree" for t in r["turns"]
    )
    assert metrics["decode/verify_ms"] == pytest.approx(1000 * verify / tree["rounds"])


def test_one_differing_prompt_makes_a_method_not_lossless() -> None:
    found = measurement(4, diverging=True)  # on the fourth prompt
    built = build_results(found, experiment=EXPERIMENT, target=TARGET, header=HEADER)
    assert decode_metrics(built)["decode/lossless"] == 0.0


def test_a_measurement_of_plain_decoding_alone_has_no_headline_metrics() -> None:
    alone = Measurement({"plain": measurement(2).records["plain"]}, {"plain": True})
    found = build_results(alone, experiment=EXPERIMENT, target=TARGET, header=HEADER)
    metrics = decode_metrics(found)
    assert "decode/plain/tokens_per_second" in metrics
    assert "decode/tokens_per_second" not in metrics


def test_a_lossy_rule_is_never_logged_as_lossless(tmp_path: Path) -> None:
    built = build_results(
        measurement(4, lossy=True), experiment=EXPERIMENT, target=TARGET, header=HEADER
    )
    assert built["methods"]["tree"]["identical_share"] == 1
    stub = Stub()
    Tracking([], tmp_path / "history.jsonl", "online", stub).log_results(built, [])
    named = {row[2] for row in stub.logged["decode/requests"].data}
    assert named == {"plain", "HF generate", "chain", "tree (lossy)"}
    metrics = decode_metrics(built)
    assert (metrics["decode/tree/lossless"], metrics["decode/chain/lossless"]) == (0.0, 1.0)
