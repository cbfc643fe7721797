"""Where a run is recorded: always in a history file, and with Weights & Biases where it works.

W&B is offline unless the configuration, the environment or a sweep has it online, and imported
only when it is used. A failure of an offline W&B never ends a run.
"""

from __future__ import annotations

import os
import re
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.config.saved import HISTORY
from falcon_lab.environment import wandb_mode, wandb_run
from falcon_lab.errors import FalconLabError, one_line
from falcon_lab.files import make_folder, write_atomically
from falcon_lab.report.methods import named
from falcon_lab.report.tables import NOTHING
from falcon_lab.report.tree_drawing import draw_svg, draw_text
from falcon_lab.stored import read_bounded

if TYPE_CHECKING:
    from falcon_lab.config.schema import WandbConfig

RUN_ID = "wandb-run-id"


def run_id(folder: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Return the W&B id of the run in ``folder``; it is stored there, for when the run resumes."""
    given = wandb_run(environment)
    file = folder / RUN_ID
    if not given and file.exists():
        stored = read_bounded(file).decode(errors="replace").strip()
        if re.fullmatch(r"[\w-]{1,64}", stored, re.ASCII):  # else it is damaged: a new one
            return stored
    chosen = given or secrets.token_hex(4)
    write_atomically(file, chosen + "\n")
    return chosen


@dataclass
class Tracking:
    """The loggers of one run.

    Attributes:
        loggers: for the Trainer.
        history: file of the training curves.
        mode: of W&B; ``disabled`` also when it could not be started.
        wandb: Lightning's ``WandbLogger``, or None.
    """

    loggers: list[Any]
    history: Path
    mode: str
    wandb: Any = None

    @property
    def offline_folder(self) -> Path | None:
        """Return the folder of the offline run, for ``wandb sync``; None when there is none."""
        if self.mode != "offline" or self.wandb is None:
            return None
        return Path(str(self.wandb.experiment.settings.sync_dir))

    def log_results(self, results: Mapping[str, Any], trees: Sequence[Mapping[str, Any]]) -> None:
        """Log ``decode/*`` metrics and the tables ``decode/requests`` and ``decode/trees``."""
        if self.wandb is not None:
            with self._offline_may_fail():
                _log_results(self.wandb.experiment, results, trees)

    def log_drafter(
        self, folder: Path, *, head: str, target: str, metadata: Mapping[str, Any]
    ) -> None:
        """Log the saved drafter as the artifact ``drafter-<head>-<target>``; only when online.

        (Offline, W&B would copy it to a staging folder that is never emptied.)
        """
        if self.wandb is None or self.mode != "online":
            return
        import wandb

        name = f"drafter-{head}-{target}".replace("/", "-")
        artifact = wandb.Artifact(name, type="model", metadata=dict(metadata))
        artifact.add_dir(str(folder))
        self.wandb.experiment.log_artifact(artifact, aliases=["last"])

    def finish(self, *, failed: bool = False) -> None:
        """Close the W&B run."""
        if self.wandb is not None:
            with self._offline_may_fail():
                self.wandb.experiment.finish(exit_code=int(failed))

    @contextmanager
    def _offline_may_fail(self) -> Iterator[None]:
        """Run a block in which an offline W&B may fail; online the error is the user's to know."""
        try:
            yield
        except Exception as error:  # W&B raises errors of many families
            if self.mode == "online":
                raise
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Continue without W&B, with a warning."""
        warnings.warn(
            f"W&B failed and is left out of this run: {type(error).__name__}: {one_line(error)}. "
            f"Curves are in {self.history}; wandb.mode=disabled silences this.",
            stacklevel=3,
        )
        self.loggers[:] = [log for log in self.loggers if log is not self.wandb]
        self.wandb, self.mode = None, "disabled"


def check_tracking(config: WandbConfig) -> None:
    """See that somebody is logged in where W&B is to be online; nothing is sent.

    Raises:
        FalconLabError: nobody is, or W&B has no such mode.
    """
    if wandb_mode(config.mode) != "online":
        return
    try:
        import wandb

        if "prompt" not in signature(wandb.login).parameters:  # of older releases, which would ask
            return
        logged_in = wandb.login(prompt=False, verify=False)
    except Exception as error:  # W&B raises errors of many families
        raise offline_advice(error) from error
    if not logged_in:
        raise offline_advice(FalconLabError("nobody is logged in"))


def offline_advice(error: Exception) -> FalconLabError:
    """Return an error of an online W&B with what to do."""
    return FalconLabError(
        f"W&B cannot go online ({type(error).__name__}: {one_line(error)}); run `wandb login`, or "
        "set WANDB_MODE=offline"
    )


def start_tracking(
    folder: Path,
    config: WandbConfig,
    experiment: Mapping[str, Any],
    *,
    job_type: str = "train",
) -> Tracking:
    """Return the loggers of a run in ``folder``, which is made if need be.

    Args:
        folder: of the run.
        config: the experiment's ``wandb`` section.
        experiment: the whole resolved experiment as plain nested values, overrides applied. A
            sweep puts its own flat keys beside it, with the same values.
        job_type: ``train`` or ``bench``.

    Raises:
        FalconLabError: when W&B is to be online and cannot be.
    """
    from falcon_lab.history import HistoryLogger

    make_folder(folder)
    history = HistoryLogger(folder / HISTORY)
    tracking = Tracking([history], history.path, wandb_mode(config.mode))
    if tracking.mode == "disabled":
        return tracking
    try:
        tracking.wandb = _wandb_logger(folder, config, experiment, tracking.mode, job_type)
    except Exception as error:  # W&B raises errors of many families
        if tracking.mode == "online":
            raise offline_advice(error) from error
        tracking.give_up(error)
    else:
        tracking.loggers.append(tracking.wandb)
    return tracking


def _wandb_logger(
    folder: Path, config: WandbConfig, experiment: Mapping[str, Any], mode: str, job_type: str
) -> Any:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    # Its closing summary would drown our table. Online it still prints the run's address.
    settings = wandb.Settings(silent=mode == "offline", quiet=True)
    name = experiment.get("name")
    logger = WandbLogger(
        name=name,
        project=config.project,
        save_dir=folder,
        id=run_id(folder),
        mode=mode,
        resume="allow",
        entity=config.entity,
        group=config.group or name,
        tags=list(config.tags),
        job_type=job_type,
        config=dict(experiment),
        settings=settings,
    )
    run = logger.experiment  # starts W&B, here and not in mid-training
    if hasattr(run, "define_metric"):  # other processes of a distributed run get a dummy
        run.define_metric("decode/mean_accepted", summary="max")
        run.define_metric("decode/speedup", summary="max")
        run.define_metric("val/loss", summary="min")
    return logger


def decode_metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """Return ``decode/*`` of the headline method, and ``decode/<method>/*`` of every method.

    ``decode/mean_accepted`` counts the bonus token (τ, 1 + accepted/rounds), as vLLM does.
    """
    metrics: dict[str, float] = {}
    for name, summary in results["methods"].items():
        found = _method_metrics(summary)
        metrics |= {f"decode/{name.replace(' ', '_')}/{key}": v for key, v in found.items()}
        if name == results["headline"]:
            metrics |= {f"decode/{key}": value for key, value in found.items()}
    return metrics


def _method_metrics(s: Mapping[str, Any]) -> dict[str, float]:
    speedup = s["speedup"] or {}
    rounds = s["rounds"] or 1
    per_round = s["new_tokens"] / rounds
    milliseconds = s["milliseconds_per_token"]
    found = {
        "mean_accepted": s["tau"],
        "mean_accepted_draft": s["tau_draft"],
        "alpha": s["alpha"],
        "tokens_per_second": s["tokens_per_second"],
        "speedup": speedup.get("ratio"),
        "speedup_low": speedup.get("low"),
        "speedup_high": speedup.get("high"),
        "tree_nodes": s["nodes_per_round"],
        "passes": s["passes_per_round"],
        "lossless": _lossless(s),
        "divergence_rate": s["divergence_rate"],
    }
    for part in ("draft", "verify", "accept_commit", "overhead"):
        if part in milliseconds:
            found[f"{part}_ms"] = milliseconds[part] * per_round
    for place, share in enumerate(s["acceptance"], start=1):
        found[f"acceptance_at_position_{place}"] = share
    return {key: float(value) for key, value in found.items() if value is not None}


def _lossless(s: Mapping[str, Any]) -> bool | None:
    """Return what was found; a lossy rule is lossy whatever was found."""
    if not s["lossless"]:
        return False
    return None if s["identical_share"] is None else s["identical_share"] == 1


def _log_results(run: Any, results: Mapping[str, Any], trees: Sequence[Mapping[str, Any]]) -> None:
    import wandb

    requests = wandb.Table(
        columns=["prompt", "category", "method", "tokens", "accepted", "tok/s", "identical", "text"]
    )
    for row in results["rows"]:
        requests.add_data(*_request(row, results["methods"]))
    drawn = wandb.Table(columns=["prompt", "method", "round", "accepted", "tree"])
    for tree in trees:
        accepted = len(tree["accepted"]) - 1
        method = named(tree.get("method"), results["methods"])
        drawn.add_data(tree.get("prompt"), method, tree.get("round"), accepted, draw_text(tree))
    logged: dict[str, Any] = {"decode/requests": requests, "decode/trees": drawn}
    # A picture inside a table would be lost in an offline run's own files.
    pictures = [wandb.Html(draw_svg(tree), inject=False) for tree in trees]
    if pictures:
        logged["decode/tree"] = pictures
    run.log(decode_metrics(results) | logged)


def _request(row: Mapping[str, Any], methods: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a row of the table ``decode/requests``."""
    accepted = [a for turn in row["turns"] for a in turn["rounds"]["accepted"]]
    wall = sum(turn["times"]["wall"] for turn in row["turns"])
    mean = sum(accepted) / len(accepted) if accepted else None
    return (
        row["prompt"],
        row["category"],
        named(row["method"], methods),
        row["new_tokens"],
        NOTHING if mean is None else f"{mean:.2f}",
        row["new_tokens"] / wall,
        row["identical"],
        "\n\n".join(turn["text"] for turn in row["turns"]),
    )
