"""What Chimera's draft model drafts, and how it learns it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from falcon_lab_hydra import ChimeraConfig
from falcon_lab_hydra.chimera import ChimeraDrafter
from hydra_cases import KNOWN, drafter, engine, inputs, target, text
from torch import nn
from transformers import LlamaConfig

from falcon_lab import testing
from falcon_lab.interfaces import BuildContext, Frontier, Observation
from falcon_lab.testing.compiling import Pretend

ROOT = Frontier.root(torch.device("cpu"))


@torch.no_grad()
def test_a_branch_reads_the_text_and_the_trigrams_of_its_own_path() -> None:
    """Written out, for two branches below the root."""
    made, features, tokens = drafter("chimera"), torch.randn(3, 32), text(3)
    made.observe(Observation(tokens, features))
    first = made.draft(ROOT)
    below = made.draft(Frontier(torch.tensor([[5], [7]]), torch.tensor([0, 0])))

    def by_hand(*path: int) -> torch.Tensor:
        whole = [*tokens.tolist(), *path]
        ends = [whole[: len(whole) - ahead] for ahead in range(len(path), -1, -1)]
        grams = made.host.embed(torch.tensor([end[-3:] for end in ends]))
        rows = torch.cat([features, made.trigram(grams)])
        mask = torch.ones(1, len(rows), len(rows), dtype=torch.bool).tril()
        positions = torch.arange(len(rows))[None]
        encoded = made.context(embeddings=rows[None], positions=positions, mask=mask)[0, -1]
        return made.heads[len(path)](torch.cat([features[-1], encoded]))

    torch.testing.assert_close(first.logits[0, 0], by_hand())
    torch.testing.assert_close(below.logits[:, 0], torch.stack([by_hand(5), by_hand(7)]))


@torch.no_grad()
def test_before_a_text_s_first_token_it_stands_itself() -> None:
    made = drafter("chimera")
    given = inputs(made, 4, 5)
    grams = made._trigrams(given, 0)
    embedded = made.host.embed(given.tokens)
    for row in (0, 4):
        assert torch.equal(grams[0, row], embedded[0, [row, row, row]])
    assert torch.equal(grams[0, 5], embedded[0, [4, 4, 5]])
    assert torch.equal(made._trigrams(given, 2)[0, 4], embedded[0, [4, 5, 6]])


@torch.no_grad()
def test_a_head_begins_as_the_target_s_lm_head_on_both_halves() -> None:
    made = drafter("chimera", stir=0)
    one, other = torch.randn(2, 32)
    expected = (made.host.head(one) + made.host.head(other)) / 2
    torch.testing.assert_close(made.heads[2](torch.cat([one, other])), expected)


def test_the_loss_has_the_distance_to_the_target_s_features() -> None:
    made = drafter("chimera")
    batch = testing.packed([[text(12)]])
    objective = {"name": "falcon", "feature_form": "mse", "soft": 0.0, "hard": 0.0}
    module = testing.distillation(made.host, made, objective=objective, components=KNOWN, noise=0.0)
    loss, _ = module.step(batch).train(0.0)
    given = testing.training_inputs(made.host, made, batch, torch.Generator())
    features = made.host.teacher(batch.tokens, batch.documents, batch.positions)
    squared = (made(given).features[0, :-1] - features[0, 1:-1]).square().mean(-1)
    torch.testing.assert_close(loss, squared.sum())


def test_it_has_the_weights_of_the_paper_s_draft_model_for_vicuna_7b() -> None:
    wide, inner, vocabulary = 4096, 11008, 32000
    vicuna = LlamaConfig(hidden_size=wide, intermediate_size=inner, num_attention_heads=32)
    host: Any = SimpleNamespace(hidden_size=wide, config=vicuna, max_positions=2048)
    host.copy_head = lambda: nn.Linear(wide, vocabulary, bias=False)
    with torch.device("meta"):
        made = ChimeraDrafter(ChimeraConfig(), BuildContext(host))
    counted = sum(weight.numel() for weight in made.parameters())
    encoder = (3 * wide) ** 2 + 3 * wide + 3 * wide * wide
    layer = 4 * wide * wide + 3 * wide * inner + 3 * wide
    assert counted == encoder + layer + 4 * 2 * wide * vocabulary


def test_it_drafts_the_published_tree_through_compiled_passes() -> None:
    tree, compiler = {"name": "static", "template": "chimera"}, Pretend()
    made = drafter("chimera").compiled(lambda line: None, compiler)
    rounds = testing.lossless_rounds(engine(target(), made, tree=tree), [[5], [3, 1, 4, 1]], 20)
    assert testing.accepted(rounds) > 0
    assert max(done.passes for done in rounds) == 4
    assert any(name.startswith("drafter-context") for name in compiler.names)
