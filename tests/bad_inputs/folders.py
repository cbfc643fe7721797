"""Folders of drafters, runs and comparisons that somebody edited, cut short or put together."""

from __future__ import annotations

from pathlib import Path

from bad_inputs.case import (
    NESTED,
    BadInput,
    Change,
    all_of,
    cut,
    edit,
    folder_at,
    link_at,
    remove,
    write,
    write_over,
)

DRAFT = "generate --prompt 'a b' --drafter shared"
CONFIG, WEIGHTS = "shared/config.json", "shared/model.safetensors"


def copy(source: str, path: str) -> Change:
    """Put a file in another one's place."""
    return lambda: write(path, Path(source).read_bytes())()


def foreign_checkpoint(path: str) -> Change:
    """Put a checkpoint there that is no one of ours."""

    def change() -> None:
        import torch

        torch.save({"state_dict": {"a": torch.zeros(2)}}, path)

    return change


DRAFTERS = [
    ("no config.json", remove(CONFIG), "shared", "name the folder of one"),
    ("a folder as config.json", folder_at(CONFIG), CONFIG, "folder stands"),
    ("a link to nothing as config.json", link_at(CONFIG, "nowhere"), CONFIG, "link"),
    ("an empty config.json", write(CONFIG, ""), CONFIG, "save"),
    ("a config.json cut short", cut(CONFIG, 100), CONFIG, "save"),
    ("a list as config.json", write(CONFIG, "[]"), CONFIG, "save"),
    ("null as config.json", write(CONFIG, "null"), CONFIG, "save"),
    ("a config.json without anything", write(CONFIG, "{}"), CONFIG, "save"),
    ("a NUL in config.json", write(CONFIG, b"{\0}"), CONFIG, "save"),
    ("a config.json in UTF-16", write(CONFIG, "{}".encode("utf-16")), CONFIG, "save"),
    ("NaN in config.json", write(CONFIG, '{"format": NaN}'), CONFIG, "save"),
    ("a deep config.json", write(CONFIG, NESTED), CONFIG, "save"),
    ("a deep value", write(CONFIG, '{"drafter":' * 100_000 + "1" + "}" * 100_000), CONFIG, "save"),
    ("half a character", write(CONFIG, r'{"format": 1, "target": "\ud83d"}'), CONFIG, "save"),
    ("another format", edit(CONFIG, "format", 99), CONFIG, "falcon-lab"),
    ("a format that is text", edit(CONFIG, "format", "1"), "format", "save"),
    ("no format", edit(CONFIG, "format", gone=True), "format", "save"),
    *(
        (f"{key} as {value!r}", edit(CONFIG, key, value), CONFIG, "save")
        for key in ("drafter", "target")
        for value in (None, "falcon", [], {}, 3)
    ),
    ("no drafter", edit(CONFIG, "drafter", gone=True), "drafter", "save"),
    ("no target", edit(CONFIG, "target", gone=True), "target", "save"),
    ("no provenance", edit(CONFIG, "provenance", gone=True), "provenance", "save"),
    ("a provenance that is text", edit(CONFIG, "provenance", "me"), "provenance", "save"),
    ("no name", edit(CONFIG, "drafter.name", gone=True), CONFIG, "save"),
    ("a name that is a list", edit(CONFIG, "drafter.name", ["falcon"]), CONFIG, "save"),
    ("an unknown drafter", edit(CONFIG, "drafter.name", "falcn"), "falcn", "falcon"),
    ("an unknown option", edit(CONFIG, "drafter.blok", 2), "blok", "block"),
    ("a block of 0", edit(CONFIG, "drafter.block", 0), "block", "at least 1"),
    ("a block that is text", edit(CONFIG, "drafter.block", "two"), "block", "whole number"),
    ("a block of 1000000", edit(CONFIG, "drafter.block", 1000000), "block", "at most"),
    ("layers: 10000000", edit(CONFIG, "drafter.layers", 10000000), "layers", "at most"),
    ("layers: 2", edit(CONFIG, "drafter.layers", 2), WEIGHTS, "config.json"),
    ("an interpolation as block", edit(CONFIG, "drafter.block", "${seed}"), "block", "number"),
    ("no target name", edit(CONFIG, "target.name", gone=True), "target.name", "save"),
    ("a null target name", edit(CONFIG, "target.name"), "target.name", "save"),
    ("a target name of a list", edit(CONFIG, "target.name", ["a"]), "target.name", "save"),
    ("an empty target name", edit(CONFIG, "target.name", ""), "target", "target"),
    (
        "a secret as target name",
        edit(CONFIG, "target.name", "${oc.env:HOME}"),
        "${oc.env:HOME}",
        "folder",
    ),
    ("a recursive target name", edit(CONFIG, "target.name", "${out}"), "${out}", "folder"),
    ("a path as target name", edit(CONFIG, "target.name", "/etc/passwd"), "/etc/passwd", "JSON"),
    ("a NUL as target name", edit(CONFIG, "target.name", "a\0b"), "x00b", "choose another"),
    ("a target that moved", remove("target"), "target", "folder"),
    ("a revision that is a number", edit(CONFIG, "target.revision", 3), "revision", "save"),
    ("another fingerprint", edit(CONFIG, "target.fingerprint", "0"), "shared", "fingerprint"),
    ("a null fingerprint", edit(CONFIG, "target.fingerprint"), "fingerprint", "save"),
    ("no weights", remove(WEIGHTS), WEIGHTS, "save the drafter again"),
    ("empty weights", write(WEIGHTS, b""), WEIGHTS, "again"),
    ("weights cut short", cut(WEIGHTS, 1000), WEIGHTS, "again"),
    ("weights cut short by a byte", cut(WEIGHTS, -1), WEIGHTS, "again"),
    ("a page in place of weights", write(WEIGHTS, "<html>" * 100), WEIGHTS, "again"),
    ("a header of 2^63", write(WEIGHTS, b"\xff" * 64), WEIGHTS, "again"),
    ("a pickle in place of weights", write(WEIGHTS, b"\x80\x04cos\nsystem\n"), WEIGHTS, "again"),
    ("a pointer of Git LFS", write(WEIGHTS, "version https://git-lfs"), WEIGHTS, "again"),
    ("a folder in place of weights", folder_at(WEIGHTS), WEIGHTS, "again"),
    ("a link in place of weights", link_at(WEIGHTS, "nowhere"), WEIGHTS, "again"),
    (
        "weights of the target",
        copy("target/model.safetensors", WEIGHTS),
        WEIGHTS,
        "config.json",
    ),
]
"""What is wrong with a drafter's folder; the place and a part of the advice."""


FACTS, RESULTS, CHECKPOINT = (
    "runs/tiny/training.json",
    "runs/tiny/results.json",
    "runs/tiny/checkpoints/last.ckpt",
)
AGAIN = "run x.yaml"
REPORT = "run x.yaml 'stages=[report]'"
MEASURE = "evaluate runs/tiny"
GO_ON = remove("runs/tiny/drafter")

RUNS = [
    ("facts that are empty", AGAIN, write(FACTS, ""), FACTS, "beside it"),
    ("facts cut short", AGAIN, cut(FACTS, 100), FACTS, "beside it"),
    ("facts that are a list", AGAIN, write(FACTS, "[]"), FACTS, "beside it"),
    ("facts that are null", AGAIN, write(FACTS, "null"), FACTS, "beside it"),
    ("facts that are no UTF-8", AGAIN, write(FACTS, b"\xff{}"), FACTS, "beside it"),
    ("facts that are deep", AGAIN, write(FACTS, NESTED), FACTS, "beside it"),
    ("facts that are a folder", AGAIN, folder_at(FACTS), FACTS, "choose another"),
    ("facts of another run", AGAIN, edit(FACTS, "seed", 5), "seed=5", "out=FOLDER"),
    ("no facts, another seed", f"{AGAIN} seed=5", remove(FACTS), "seed", "out="),
    (
        "no facts, another rate",
        f"{AGAIN} distillation.optimizer.lr=0.1",
        remove(FACTS),
        "lr",
        "out",
    ),
    ("another seed", f"{AGAIN} seed=5", None, "seed=0", "out=FOLDER"),
    ("another drafter", f"{AGAIN} drafter.block=3", None, "drafter.block=2", "out=FOLDER"),
    ("other data", f"{AGAIN} data.documents=4", None, "data.documents=3", "out=FOLDER"),
    ("a lock that is a folder", AGAIN, folder_at("runs/tiny/.lock"), ".lock", "folder stands"),
    ("answers that are a file", MEASURE, write_over("runs/tiny/answers"), "answers", "file stands"),
    ("a run that is a file", AGAIN, write_over("runs/tiny"), "runs/tiny", "a file stands"),
    ("runs that are a file", AGAIN, write_over("runs"), "runs", "a file stands"),
    ("runs that lead to nothing", AGAIN, link_at("runs", "nowhere"), "runs", "choose another"),
    ("runs that lead to themselves", AGAIN, link_at("runs", "runs"), "runs", "link"),
    (
        "checkpoints that are a file",
        AGAIN,
        all_of(GO_ON, write_over("runs/tiny/checkpoints")),
        "checkpoints",
        "a file stands",
    ),
    (
        "a checkpoint that is empty",
        f"{AGAIN} trainer.max_steps=2",
        all_of(GO_ON, write(CHECKPOINT, b"")),
        CHECKPOINT,
        "delete runs/tiny/checkpoints",
    ),
    (
        "a checkpoint cut short",
        AGAIN,
        all_of(GO_ON, cut(CHECKPOINT, 5000)),
        CHECKPOINT,
        "delete runs/tiny/checkpoints",
    ),
    (
        "a checkpoint that is text",
        AGAIN,
        all_of(GO_ON, write(CHECKPOINT, "hello")),
        CHECKPOINT,
        "delete runs/tiny/checkpoints",
    ),
    (
        "a checkpoint that is a folder",
        AGAIN,
        all_of(GO_ON, folder_at(CHECKPOINT)),
        CHECKPOINT,
        "folder stands",
    ),
    ("no results", REPORT, remove(RESULTS), RESULTS, "evaluate"),
    ("results that are empty", REPORT, write(RESULTS, ""), RESULTS, "evaluate"),
    ("results cut short", REPORT, cut(RESULTS, 500), RESULTS, "evaluate"),
    ("results that are a list", REPORT, write(RESULTS, "[]"), RESULTS, "evaluate"),
    ("results without anything", REPORT, write(RESULTS, "{}"), RESULTS, "evaluate"),
    ("results of another version", REPORT, edit(RESULTS, "schema", 7), "schema", "evaluate"),
    ("results that are deep", REPORT, write(RESULTS, NESTED), RESULTS, "evaluate"),
    ("results that are a folder", REPORT, folder_at(RESULTS), RESULTS, "folder stands"),
    *(
        (f"results without {key}", REPORT, edit(RESULTS, key, gone=True), key, "evaluate")
        for key in ("schema", "methods", "rows", "target", "protocol", "experiment", "comparisons")
    ),
    *(
        (f"results with {key} as {value!r}", REPORT, edit(RESULTS, key, value), RESULTS, "evaluate")
        for key in ("methods", "rows", "target", "protocol", "experiment", "labels")
        for value in ("a", 3, [3])
    ),
    *(
        (f"results without {key}", REPORT, edit(RESULTS, key, gone=True), RESULTS, "evaluate")
        for key in ("rows.0.method", "rows.0.wall_repeats", "methods.plain.tokens_per_second")
    ),
    ("a drafter that is gone", MEASURE, remove("runs/tiny/drafter"), "runs/tiny/drafter", "distil"),
    (
        "a drafter without a config",
        MEASURE,
        remove("runs/tiny/drafter/config.json"),
        "runs/tiny/drafter",
        "distil",
    ),
    (
        "a drafter that is a file",
        MEASURE,
        write_over("runs/tiny/drafter"),
        "runs/tiny/drafter",
        "folder",
    ),
    (
        "a configuration cut short",
        MEASURE,
        cut("runs/tiny/experiment.yaml", 200),
        "experiment.yaml",
        "YAML",
    ),
    (
        "a configuration that is a folder",
        MEASURE,
        folder_at("runs/tiny/experiment.yaml"),
        "experiment.yaml",
        "name",
    ),
    (
        "a configuration with an unknown key",
        MEASURE,
        edit("runs/tiny/experiment.yaml", "lr", 3),
        "lr",
        "unknown key",
    ),
    (
        "a row named plain",
        MEASURE,
        edit("runs/tiny/experiment.yaml", "evaluation.methods.plain", {}),
        "evaluation.methods.plain",
        "choose another",
    ),
    (
        "a row that climbs",
        MEASURE,
        edit("runs/tiny/experiment.yaml", "evaluation.methods", {"../../../chats": {}}),
        "../../../chats",
        "files are called by it",
    ),
    (
        "a comparison with a drafter that is gone",
        "compare runs/tiny runs/other out=runs/two",
        remove("runs/other/drafter"),
        "runs/other",
        "drafter",
    ),
    (
        "a comparison of runs of which one has no configuration",
        "compare runs/tiny runs/other out=runs/two",
        remove("runs/other/experiment.yaml"),
        "runs/other",
        "experiment.yaml",
    ),
    (
        "a comparison into a file",
        "compare runs/tiny runs/other out=x.yaml",
        None,
        "x.yaml",
        "a file stands",
    ),
    (
        "a comparison that climbs",
        "compare runs/tiny runs/other name=../../climbed",
        None,
        "name",
        "files are called by it",
    ),
    (
        "a comparison whose rows are a file",
        "compare runs/tiny runs/other out=runs/two",
        write("runs/two/rows", ""),
        "runs/two/rows",
        "a file stands",
    ),
    (
        "a comparison whose lock is a folder",
        "compare runs/tiny runs/other out=runs/two",
        folder_at("runs/two/.compare.lock"),
        ".compare.lock",
        "a folder stands",
    ),
    (
        "a run's page that is a folder",
        f"{MEASURE} report.html=true",
        folder_at("runs/tiny/report.html"),
        "report.html",
        "a folder stands",
    ),
    (
        "tuning into a folder whose table is a folder",
        "tune shared --texts 2 --nodes 2 --depth 1 --into out evaluation.prompts.limit=1",
        folder_at("out/tune.json"),
        "tune.json",
        "a folder stands",
    ),
]

STORE = "store/train/store.json"
SHARD = "store/train/features-00000.safetensors"
FRESH = "run x.yaml out=runs/fresh"

STORES = [
    ("an index that is empty", FRESH, write(STORE, ""), STORE, "data.feature_store"),
    ("an index that is a list", FRESH, write(STORE, "[]"), STORE, "data.feature_store"),
    ("an index without anything", FRESH, write(STORE, "{}"), STORE, "data.feature_store"),
    ("an index that is a folder", FRESH, folder_at(STORE), STORE, "folder stands"),
    ("an index with text as rows", FRESH, edit(STORE, "rows", "a"), STORE, "data.feature_store"),
    (
        "an index of another target",
        FRESH,
        edit(STORE, "target", "a"),
        "store",
        "data.feature_store",
    ),
    ("an index of other data", FRESH, edit(STORE, "data", "a"), "store", "data.feature_store"),
    ("a shard that is a folder", FRESH, folder_at(SHARD), "features-00000", "folder stands"),
    ("a store that is a file", FRESH, write_over("store"), "store", "a file stands"),
    ("a store for other data", f"{FRESH} data.documents=4", None, "store", "data.feature_store"),
]

CASES = [
    *(BadInput(what, DRAFT, place, advice, change) for what, change, place, advice in DRAFTERS),
    *(
        BadInput(what, words, place, advice, change, leaves=("runs/two/.compare.lock",))
        for what, words, change, place, advice in RUNS
    ),
    *(
        BadInput(what, words, place, advice, change, leaves=("runs/fresh", "runs/fresh/*"))
        for what, words, change, place, advice in STORES
    ),
]
