import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.drafters.saved import load_drafter, read_config, save_as, save_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, Frontier, Observation
from falcon_lab.model.target import Target
from falcon_lab.plugins.builtins import FalconConfig
from falcon_lab.plugins.discovery import load_components
from tiny_models import tiny_target

NODE = {"name": "falcon", "block": 3, "layers": 2, "query": "newest"}
ORIGIN = {"name": "falcon", "distribution": "falcon-lab", "version": "0"}


def _drafter(target: Target, seed: int = 0) -> FalconDrafter:
    torch.manual_seed(seed)
    options = {key: value for key, value in NODE.items() if key != "name"}
    return FalconDrafter(FalconConfig(**options), BuildContext(target)).eval()  # type: ignore[arg-type]


def _save(folder: Path, target: Target, seed: int = 0) -> FalconDrafter:
    made = _drafter(target, seed)
    save_drafter(folder, made, node=NODE, provenance=ORIGIN, target=target, card=f"# seed {seed}")
    return made


def _drafts(drafter: Any) -> torch.Tensor:
    drafter.reset(torch.tensor(3))
    features = torch.linspace(-1, 1, 4 * 32).view(4, 32)
    drafter.observe(Observation(torch.tensor([4, 5, 6, 7]), features))
    return drafter.draft(Frontier.root(torch.device("cpu"))).logits


def _load(folder: Path, target: Target, **options: Any) -> Any:
    return load_drafter(folder, target, load_components(), **options)


def test_a_saved_drafter_drafts_as_before(tmp_path: Path) -> None:
    target = tiny_target()
    made = _save(tmp_path / "drafter", target)
    loaded = _load(tmp_path / "drafter", target)
    assert not loaded.training
    assert torch.equal(_drafts(loaded), _drafts(made))
    assert sorted(p.name for p in (tmp_path / "drafter").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert (tmp_path / "drafter" / "README.md").read_text() == "# seed 0"


def test_the_folder_says_what_it_is(tmp_path: Path) -> None:
    target = tiny_target()
    _save(tmp_path / "drafter", target)
    config = read_config(tmp_path / "drafter")
    assert config["drafter"] == NODE
    assert config["provenance"] == ORIGIN
    assert config["target"]["fingerprint"] == target.fingerprint
    assert config["target"]["name"] == "tiny-llama"


def test_a_drafter_takes_the_target_s_precision(tmp_path: Path) -> None:
    target = tiny_target()
    _save(tmp_path / "drafter", target)
    target.model.double()
    loaded = _load(tmp_path / "drafter", target)
    assert {p.dtype for p in loaded.parameters()} == {torch.float64}
    assert _drafts(loaded).dtype == torch.float64


def test_weights_saved_in_bfloat16_draft_in_its_target_as_those_in_float32(tmp_path: Path) -> None:
    target = tiny_target()
    made = _save(tmp_path / "whole", target)
    for name in ("half", "again"):
        save_drafter(
            tmp_path / name,
            made,
            node=NODE,
            provenance=ORIGIN,
            target=target,
            card="# Half",
            dtype="bfloat16" if name == "half" else "auto",
        )
    assert save_as(tmp_path / "again", "bfloat16")
    assert not save_as(tmp_path / "again", "bfloat16")
    assert not save_as(tmp_path / "whole", "auto")
    files = [
        [(tmp_path / name / part).read_bytes() for part in ("model.safetensors", "README.md")]
        for name in ("half", "again")
    ]
    assert files[0] == files[1]
    assert read_config(tmp_path / "again") == read_config(tmp_path / "whole")
    size = [(tmp_path / n / "model.safetensors").stat().st_size for n in ("whole", "half")]
    assert size[1] < 0.6 * size[0]
    assert _drafts(_load(tmp_path / "half", target)).dtype == torch.float32
    target.model.bfloat16()
    with torch.no_grad():
        half, whole = (_drafts(_load(tmp_path / name, target)) for name in ("half", "whole"))
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, whole)


def test_another_target_is_refused_by_both_fingerprints_unless_forced(tmp_path: Path) -> None:
    target, other = tiny_target(), tiny_target(seed=5)
    _save(tmp_path / "drafter", target)
    with pytest.raises(FalconLabError) as caught:
        _load(tmp_path / "drafter", other)
    assert target.fingerprint in str(caught.value)
    assert other.fingerprint in str(caught.value)
    assert _drafts(_load(tmp_path / "drafter", other, force=True)).isfinite().all()


def test_forcing_a_drafter_of_another_width_names_the_file(tmp_path: Path) -> None:
    _save(tmp_path / "drafter", tiny_target())
    with pytest.raises(FalconLabError, match=r"model\.safetensors does not fit"):
        _load(tmp_path / "drafter", tiny_target(hidden=64), force=True)


@pytest.mark.parametrize("left", [0, 4, 1000])
def test_truncated_weights_are_named(tmp_path: Path, left: int) -> None:
    target = tiny_target()
    _save(tmp_path / "drafter", target)
    weights = tmp_path / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left])
    with pytest.raises(FalconLabError, match=r"model\.safetensors is damaged"):
        _load(tmp_path / "drafter", target)


def test_missing_and_strange_files_are_named(tmp_path: Path) -> None:
    target = tiny_target()
    with pytest.raises(FalconLabError, match="no saved drafter here"):
        _load(tmp_path / "nothing", target)
    _save(tmp_path / "drafter", target)
    config = tmp_path / "drafter" / "config.json"
    whole = json.loads(config.read_text())
    for content, problem in (
        ("{", "not whole JSON"),
        ("[]", "must be an object"),
        ("{}", "format: the field is required"),
        (json.dumps(whole | {"target": None}), "target: must be an object"),
        (json.dumps(whole | {"drafter": {}}), r"drafter\.name: the field is required"),
        (json.dumps(whole | {"format": 2}), "has format 2"),
    ):
        config.write_text(content)
        with pytest.raises(FalconLabError, match=rf"config\.json: .*{problem}"):
            _load(tmp_path / "drafter", target)
    _save(tmp_path / "drafter", target)
    (tmp_path / "drafter" / "model.safetensors").unlink()
    with pytest.raises(FalconLabError, match=r"model\.safetensors is missing"):
        _load(tmp_path / "drafter", target)


def test_weights_that_are_not_the_drafters_are_refused(tmp_path: Path) -> None:
    target = tiny_target()
    state = _save(tmp_path / "drafter", target).state_dict()
    name = next(iter(state))
    for changed, problem in (
        ({name: state[name] * torch.nan}, f"{name} holds numbers that are not finite"),
        ({name: state[name].long()}, f"{name} is of torch.int64"),
        ({name: state[name][:1]}, f"{name} is "),
        ({"more": state[name]}, "more is one too many"),
    ):
        tensors = {key: value.clone() for key, value in (state | changed).items()}
        safetensors.torch.save_file(tensors, tmp_path / "drafter" / "model.safetensors")
        with pytest.raises(FalconLabError, match=f"does not fit its config.json: {problem}"):
            _load(tmp_path / "drafter", target)


def test_reading_touches_nothing_beside_the_drafter(tmp_path: Path) -> None:
    target = tiny_target()
    _save(tmp_path / "drafter", target)
    mine = tmp_path / ".drafter.old"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    _load(tmp_path / "drafter", target)
    assert (mine / "notes.txt").read_text() == "mine"
    with pytest.raises(FalconLabError, match=r"\.drafter\.old: is in the way"):
        _save(tmp_path / "drafter", target)
    assert (mine / "notes.txt").read_text() == "mine"


def test_a_folder_with_more_than_a_drafter_is_kept(tmp_path: Path) -> None:
    target = tiny_target()
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "notes.txt").write_text("mine")
    _save(tmp_path / "drafter", target)
    assert (tmp_path / "drafter.1" / "notes.txt").read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["drafter", "drafter.1"]


def test_a_drafter_of_an_absent_plug_in_is_named(tmp_path: Path) -> None:
    target = tiny_target()
    _save(tmp_path / "drafter", target)
    path = tmp_path / "drafter" / "config.json"
    config = json.loads(path.read_text())
    config["drafter"] = {"name": "nonesuch"}
    path.write_text(json.dumps(config))
    with pytest.raises(FalconLabError, match="nonesuch"):
        _load(tmp_path / "drafter", target)


def test_no_pickle_is_ever_read(tmp_path: Path) -> None:
    target = tiny_target()
    made = _save(tmp_path / "drafter", target)
    weights = tmp_path / "drafter" / "model.safetensors"
    torch.save(made.state_dict(), weights)
    with pytest.raises(FalconLabError, match=r"model\.safetensors is damaged"):
        _load(tmp_path / "drafter", target)


def test_saving_again_replaces_what_was_there(tmp_path: Path) -> None:
    target = tiny_target()
    _save(tmp_path / "drafter", target)
    newer = _save(tmp_path / "drafter", target, seed=1)
    assert torch.equal(_drafts(_load(tmp_path / "drafter", target)), _drafts(newer))
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"]


@pytest.mark.parametrize("there", [True, False])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    target = tiny_target()
    if there:
        old = _save(tmp_path / "drafter", target)

    def fill_up(state: Any, path: Path, **settings: Any) -> None:
        path.write_bytes(b"half")
        raise safetensors.SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", fill_up)
    with pytest.raises(FalconLabError, match="No space left"):
        _save(tmp_path / "drafter", target, seed=1)
    assert [p.name for p in tmp_path.iterdir()] == (["drafter"] if there else [])
    if there:
        assert torch.equal(_drafts(_load(tmp_path / "drafter", target)), _drafts(old))


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_killed_between_two_renames_there_is_always_a_whole_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    class Killed(BaseException):
        pass

    target = tiny_target()
    old = _save(tmp_path / "drafter", target)
    rename, done = Path.rename, []

    def counted(path: Path, to: Path) -> Path:
        if len(done) == renames:
            raise Killed
        done.append(to)
        return rename(path, to)

    def no_removal(*args: Any, **kwargs: Any) -> None:
        if len(done) == renames == 2:
            raise Killed

    monkeypatch.setattr(Path, "rename", counted)
    monkeypatch.setattr("shutil.rmtree", no_removal)
    with pytest.raises(Killed):
        _save(tmp_path / "drafter", target, seed=1)
    monkeypatch.undo()
    expected = _drafter(target, seed=1) if renames == 2 else old
    assert torch.equal(_drafts(_load(tmp_path / "drafter", target)), _drafts(expected))
    newest = _save(tmp_path / "drafter", target, seed=2)
    assert torch.equal(_drafts(_load(tmp_path / "drafter", target)), _drafts(newest))
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"]
