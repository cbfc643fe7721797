"""Environment variables: read here, so that a wrong value is one line that names the variable.

They are checked at the beginning of every command, before the libraries that read them too fail in
words of their own, or take a value for another.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from falcon_lab.errors import FalconLabError
from falcon_lab.fields import Choice, Name, Range

RANK = Range(least=0, most=10**6)
THREADS = Range(least=1, most=1024)
SECONDS = Range(least=0, most=10**6)

NUMBERS = {
    "LOCAL_RANK": RANK,
    "RANK": RANK,
    "NODE_RANK": RANK,
    "GROUP_RANK": RANK,
    "WORLD_SIZE": Range(least=1, most=10**6),
    "OMP_NUM_THREADS": THREADS,
    "MKL_NUM_THREADS": THREADS,
    "HF_HUB_ETAG_TIMEOUT": SECONDS,
    "HF_HUB_DOWNLOAD_TIMEOUT": SECONDS,
}
"""Variable -> the whole numbers that it may be."""

LISTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Those that may hold a number for every level, as in ``4,2``; empty, they are as if unset."""

FLAG = Choice(("0", "1", "false", "true", "no", "yes", "off", "on", "n", "y"))
FLAGS = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Variables that the libraries would take for false, whatever word they hold."""

KEY_VARIABLE = "OPENAI_API_KEY"
"""Holds the key of a server that writes in the target's place."""

WANDB_MODES = ("offline", "online", "disabled")
OLDER_MODES = {"dryrun": "offline", "run": "online"}
"""W&B's older names."""


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """See that the variables which commands and libraries read can be read.

    Raises:
        FalconLabError: naming the variable, its value and what it may be.
    """
    for name, limit in NUMBERS.items():
        text = environment.get(name)
        if text is None or (not text.strip() and name in LISTS):
            continue
        for part in text.split(",") if name in LISTS else [text]:
            _check_number(name, part.strip(), limit)
    for name in FLAGS:
        if (word := environment.get(name)) and (problem := FLAG.refusal(word.lower())):
            raise FalconLabError(f"{name} {problem}; set one of them, or unset it")
    if "RANK" in environment and world_size(environment) <= int(environment["RANK"]) > 0:
        raise FalconLabError(
            f"RANK is {environment['RANK']} of WORLD_SIZE {world_size(environment)}; unset both "
            "outside of a distributed launcher"
        )


def _check_number(name: str, text: str, limit: Range) -> None:
    whole = re.fullmatch(r"[+-]?[0-9]{1,18}", text)
    problem = limit.refusal(int(text)) if whole else f"is {text[:40]!r}; it must be a whole number"
    if problem:
        raise FalconLabError(f"{name} {problem}; set another number, or unset it")


def server_key(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the key of an OpenAI-compatible server, if any; it stands in no file.

    Raises:
        FalconLabError: no request could carry it.
    """
    key = environment.get(KEY_VARIABLE, "").strip()
    if key and not re.fullmatch(r"[!-~]+", key):
        raise FalconLabError(
            f"{KEY_VARIABLE} holds blanks or characters other than ASCII; set the key alone"
        )
    return key or None


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return the processes of a distributed training; 1 where there is none."""
    tasks = environment.get("SLURM_NTASKS", "1") if _of_slurm(environment) else "1"
    return int(environment.get("WORLD_SIZE", tasks))


def is_worker(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether another process of a distributed training leads and speaks."""
    ranks = ["LOCAL_RANK", "RANK", *(["SLURM_PROCID"] if _of_slurm(environment) else [])]
    return any(environment.get(name, "0") != "0" for name in ranks)


def _of_slurm(environment: Mapping[str, str]) -> bool:
    """Return whether SLURM started several processes of one training, as Lightning sees it."""
    interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    tasks = environment.get("SLURM_NTASKS", "1")
    several = tasks.isdigit() and int(tasks) > 1
    return several and "SLURM_PROCID" in environment and not interactive


def wandb_mode(configured: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the mode of W&B: the environment's, the experiment's, or a default.

    The default is online in a sweep, whose controller an offline run would not reach, and offline
    elsewhere.

    Raises:
        FalconLabError: for a mode that W&B does not have, with who asked for it.
    """
    asked = environment.get("WANDB_MODE")
    mode = asked or configured
    if not mode:
        return "online" if environment.get("WANDB_SWEEP_ID") else "offline"
    mode = OLDER_MODES.get(mode, mode)
    if problem := Choice(WANDB_MODES).refusal(mode):
        raise FalconLabError(f"{'WANDB_MODE' if asked else 'wandb.mode'} {problem}")
    return mode


def wandb_run(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of the W&B run that a sweep or the user gave this process, if any.

    Raises:
        FalconLabError: it could not be part of a folder's name.
    """
    given = environment.get("WANDB_RUN_ID") or None
    if given is not None and (problem := Name().refusal(given)):
        raise FalconLabError(f"WANDB_RUN_ID {problem}")
    return given
