"""What the drafter reads in a step, and its seeds."""

import torch

from falcon_lab.data.packing import Batch
from falcon_lab.distill.inputs import (
    derive_seed,
    drafter_inputs,
    generator_for,
    repeated,
    seeded_dropout,
    with_own_features,
)
from falcon_lab.interfaces import Prediction
from label_cases import one_batch, one_prediction, position_features


def _generators() -> tuple[torch.Generator, torch.Generator]:
    return torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)


def test_a_row_joins_a_feature_with_the_token_after_it() -> None:
    inputs = drafter_inputs(one_batch(), position_features(), 0.0, _generators())
    assert inputs.tokens[0].tolist() == list(range(101, 110))
    assert torch.equal(inputs.features, position_features()[:, :-1])
    assert inputs.documents.shape == inputs.positions.shape == (1, 9)


def test_noise_is_uniform_and_leaves_the_labels_alone() -> None:
    features = torch.zeros(1, 2000, 5)
    long = Batch(*(x.expand(1, 10).repeat(1, 200) for x in one_batch()[:4]), torch.tensor(0))
    noisy = drafter_inputs(long, features, 0.1, _generators()).features
    assert noisy.abs().max() <= 0.1
    assert noisy.max() > 0.099
    assert noisy.min() < -0.099
    assert abs(float(noisy.mean())) < 2e-3
    again = drafter_inputs(long, features, 0.1, _generators()).features
    assert torch.equal(noisy, again)
    assert features.eq(0).all()


def test_own_features_replace_whole_blocks_where_rows_are_valid() -> None:
    features = torch.zeros(1, 10, 3)
    label = torch.arange(2, 8)[None]
    group = torch.tensor([[0, 0, 1, 1, 2, 2]])
    predicted = torch.ones(1, 6, 3)
    prediction = Prediction(predicted, None, label, label - 2, torch.zeros_like(label), group)
    valid = torch.tensor([[True, True, True, False, True, True]])
    seen = set()
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        mixed = with_own_features(features, prediction, valid, 0.5, generator)[0, :, 0]
        assert mixed[[0, 1, 5, 8, 9]].eq(0).all()
        assert mixed[2] == mixed[3]
        assert mixed[6] == mixed[7]
        seen.add(tuple(mixed.tolist()))
    assert len(seen) == 8, "each of three blocks is replaced or not, by itself"
    assert features.eq(0).all()


def test_own_features_leave_a_drafter_of_tokens_alone() -> None:
    features = position_features()
    valid = torch.ones(1, 2, dtype=torch.bool)
    alone = one_prediction([2, 3], [1, 1])
    assert with_own_features(features, alone, valid, 1.0, torch.Generator()) is features


def test_a_batch_is_repeated_along_its_sequences_with_one_index() -> None:
    batch, features = repeated(one_batch(), position_features(), 3)
    for name in ("tokens", "loss_mask", "documents", "positions"):
        whole, one = getattr(batch, name), getattr(one_batch(), name)
        assert torch.equal(whole, torch.cat([one] * 3))
    assert torch.equal(features, torch.cat([position_features()] * 3))
    assert int(batch.index) == int(one_batch().index)


def test_a_batch_repeated_once_is_itself() -> None:
    given, features = one_batch(), position_features()
    same, same_features = repeated(given, features, 1)
    assert same is given
    assert same_features is features


def test_a_seed_depends_on_every_part_and_on_nothing_else() -> None:
    seeds = {derive_seed(s, i, r, p) for s in (0, 1) for i in (0, 1) for r in (0, 1) for p in "ab"}
    assert len(seeds) == 16
    assert derive_seed(1, 2, "x") == derive_seed(1, 2, "x")
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_generators_of_one_purpose_agree() -> None:
    first, second = (torch.rand(3, generator=generator_for(1, "noise")) for _ in range(2))
    assert torch.equal(first, second)


def test_dropout_repeats_itself_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    masks = []
    for _ in range(2):
        with seeded_dropout(5, torch.device("cpu")):
            masks.append(torch.nn.functional.dropout(torch.ones(50), 0.5))
    assert torch.equal(*masks)
    assert torch.equal(torch.get_rng_state(), before)
