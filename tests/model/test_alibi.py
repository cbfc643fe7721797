"""Linear biases of keys by their positions, where they stand in a tree or in another text."""

from __future__ import annotations

import torch

from falcon_lab.model.alibi import MaskedBloom, biased, with_bias_in_masks
from tiny_models import tiny_model
from unusual_models import unusual_target


def test_the_model_that_was_given_stays_as_it_is_and_shares_its_weights() -> None:
    given = unusual_target("bloom").model.transformer
    made, slopes = with_bias_in_masks(given)
    assert type(given) is not MaskedBloom
    assert type(made) is MaskedBloom
    assert made.word_embeddings.weight is given.word_embeddings.weight
    assert slopes is not None
    assert torch.allclose(slopes, torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256]))


def test_a_model_without_biases_is_returned_as_it_is() -> None:
    given = tiny_model("llama").base_model
    assert with_bias_in_masks(given) == (given, None)


def test_keys_of_one_position_have_one_bias() -> None:
    mask = torch.zeros(1, 1, 2, 3)
    found = biased(mask, torch.tensor([0.5, 0.25]), torch.tensor([[0, 1, 1]]))
    assert found[0, :, 0].tolist() == [[0, 0.5, 0.5], [0, 0.25, 0.25]]


def test_packed_documents_are_read_as_if_each_stood_alone() -> None:
    target = unusual_target("bloom")
    tokens = torch.tensor([[5, 9, 3, 8, 4, 2]])
    documents, positions = torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.tensor([[0, 1, 2] * 2])
    packed = target.teacher(tokens, documents, positions)
    alone = target.teacher(tokens[:, 3:], documents[:, :3], positions[:, :3])
    torch.testing.assert_close(packed[:, 3:], alone, atol=1e-5, rtol=0)
