from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from falcon_lab_ffn_skip import FfnSkipConfig
from falcon_lab_ffn_skip.__main__ import main
from falcon_lab_ffn_skip.profile import curve, mean_cosines
from falcon_lab_ffn_skip.skipping import Saturation
from skip_cases import EVERYTHING, FAMILIES, FOLDER, KNOWN, drafter, engine, target

from falcon_lab import testing
from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.engine import Engine
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import EngineContext
from falcon_lab.model.target import Target

PROMPTS = [[5], [3, 1, 4, 1, 5, 9]]


def skipping(of: Target, **options: Any) -> Engine:
    context = EngineContext(of, DecodingConfig())
    made: Engine = KNOWN.build("engine", {"name": "ffn_skip", **options}, context)
    return made


def test_the_distribution_is_as_users_expect_one() -> None:
    testing.check_distribution(FOLDER)


def test_a_token_skips_from_the_network_on_that_left_its_state_as_it_was() -> None:
    """Three tokens, of which the first is in the warm-up, by hand."""
    gate = Saturation(FfnSkipConfig(threshold=0.9, first=1, last=1, warmup=3), 5)
    gate.begin(torch.tensor([2, 3, 4]))
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    before = torch.stack([x, x, x])
    assert gate.wanted(0) is None
    gate.seen(0, before, before)  # cold: nobody is saturated by it
    assert gate.wanted(1).tolist() == [True] * 3
    gate.seen(1, before, torch.stack([x, x + 0.1 * y, x + y]))  # cosines 1, 0.995, 0.707
    assert gate.wanted(2).tolist() == [True, False, True]
    gate.seen(2, before, torch.stack([x, x, x + 0.4 * y]))  # the last one's is 0.928
    assert gate.wanted(3).tolist() == [True, False, False]
    gate.seen(3, before, before)
    assert gate.wanted(4) is None
    assert (gate.asked, gate.skipped) == (15, 3)
    gate.begin(torch.tensor([9]))
    assert gate.wanted(1).tolist() == [True]


def test_without_a_token_that_is_saturated_the_engine_is_plain_decoding() -> None:
    model = target()
    whole = skipping(model, warmup=1000)
    assert not whole.lossless
    for prompt in PROMPTS:
        expected = testing.plain_text(model, prompt, 20)
        assert testing.write(whole, prompt, 20).tokens == expected
    together = testing.write_together(whole, PROMPTS * 2, 20, batch_size=3)
    assert [one.tokens for one in together] == [
        testing.plain_text(model, prompt, 20) for prompt in PROMPTS * 2
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_skipped_changes_the_engine_s_text(family: str) -> None:
    model = target(family)
    skips = skipping(model, **EVERYTHING)
    drawn = [testing.write(skips, prompt, 30, temperature=1.0).tokens for prompt in PROMPTS]
    assert drawn != [testing.plain_text(model, prompt, 30, temperature=1.0) for prompt in PROMPTS]
    texts = [testing.write(skips, prompt, 30).tokens for prompt in PROMPTS]
    together = testing.write_together(skips, PROMPTS, 30, batch_size=2)
    assert [one.tokens for one in together] == texts


@pytest.mark.parametrize("family", FAMILIES)
def test_as_a_drafter_it_changes_nothing(family: str) -> None:
    model = target(family)
    for tree in ({"name": "chain", "depth": 3}, {"name": "dynamic", "nodes": 6}):
        made = engine(model, drafter(model, **EVERYTHING), tree=tree)
        testing.lossless_rounds(made, PROMPTS, 24)
    made = engine(model, drafter(model, warmup=1000), tree={"name": "chain", "depth": 3})
    assert all(done.accepted == done.depth for done in testing.lossless_rounds(made, PROMPTS, 24))


def test_sampled_output_follows_the_target_s_distribution() -> None:
    model = testing.tiny_target(vocab=5, layers=5)
    tree = {"name": "chain", "depth": 2, "proposal": "sampled"}
    by = engine(model, drafter(model, **EVERYTHING), tree=tree)
    generator = torch.Generator().manual_seed(5)
    assert testing.fit(by, [3, 1, 4], samples=300, generator=generator, temperature=0.9) > 0.01


def test_the_profile_begins_at_the_target_s_own_perplexity_and_skips_more_and_more() -> None:
    model = target()
    texts = [torch.tensor(prompt * 3) for prompt in PROMPTS[1:]]
    means = mean_cosines(model, texts)
    assert len(means) == 5
    assert all(-1 <= mean <= 1 for mean in means)
    points = list(curve(model, texts, FfnSkipConfig(first=1, last=1, warmup=0), (2.0, 0.5, -1.0)))
    batch = testing.packed([texts])
    logits = model.head(model.teacher(batch.tokens, batch.documents, batch.positions))[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], texts[0][1:]).exp()
    assert points[0].perplexity == pytest.approx(float(expected), rel=1e-4)
    shares = [point.skipped for point in points]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(2 / 5)


def test_the_profile_is_printed(tmp_path: Path) -> None:
    model = target()
    model.model.save_pretrained(tmp_path / "target")
    model.tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "text.txt").write_text("a b c d e f " * 8, "utf-8")
    words = ["profile", str(tmp_path / "target"), str(tmp_path / "text.txt")]
    done = CliRunner().invoke(main, [*words, "--first", "1", "--last", "1"])
    assert "none              0.0%" in done.stdout
    assert len(done.stdout.splitlines()) == 1 + 5 + 2 + 11
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name in ("none.txt", "latin.txt"):
        refused = CliRunner().invoke(main, [*words[:2], str(tmp_path / name)])
        assert refused.exit_code == 2
        assert name in refused.stderr


def test_cold_regions_that_leave_nothing_are_refused() -> None:
    with pytest.raises(FalconLabError, match="nothing is left to skip"):
        drafter(target(), first=3, last=2)
