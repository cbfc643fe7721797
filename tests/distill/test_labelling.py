import torch
from torch import Tensor

from falcon_lab.data.packing import Batch
from falcon_lab.distill.labels import drafter_inputs, label_rows, repeated, with_own_features
from falcon_lab.interfaces import Prediction


def _batch() -> Batch:
    """One sequence: a document of 5 tokens, one of 3, two tokens of padding."""
    tokens = torch.arange(100, 110)[None]
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1, -1]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]])
    return Batch(tokens, documents >= 0, documents, positions, torch.tensor(0))


def _features() -> Tensor:
    return torch.arange(10.0).view(1, 10, 1).expand(1, 10, 3)


def _prediction(label: list[int], source: list[int]) -> Prediction:
    zeros = torch.zeros(1, len(label), dtype=torch.long)
    rows = torch.tensor([label]), torch.tensor([source])
    return Prediction(None, None, *rows, slot=zeros, group=zeros)


def _generators() -> tuple[torch.Generator, torch.Generator]:
    return torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)


def _valid(label: list[int], source: list[int], given: Batch | None = None) -> list[bool]:
    labels = label_rows(given or _batch(), _prediction(label, source))
    return labels.valid[0].tolist()


def test_a_row_joins_a_feature_with_the_token_after_it() -> None:
    inputs = drafter_inputs(_batch(), _features(), 0.0, _generators())
    assert inputs.tokens[0].tolist() == list(range(101, 110))
    assert torch.equal(inputs.features, _features()[:, :-1])
    assert inputs.documents.shape == inputs.positions.shape == (1, 9)


def test_noise_is_uniform_and_leaves_the_labels_alone() -> None:
    features = torch.zeros(1, 2000, 5)
    long = Batch(*(x.expand(1, 10).repeat(1, 200) for x in _batch()[:4]), torch.tensor(0))
    noisy = drafter_inputs(long, features, 0.1, _generators()).features
    assert noisy.abs().max() <= 0.1
    assert noisy.max() > 0.099
    assert noisy.min() < -0.099
    assert abs(float(noisy.mean())) < 2e-3
    again = drafter_inputs(long, features, 0.1, _generators()).features
    assert torch.equal(noisy, again)
    assert features.eq(0).all()


def test_the_label_gives_the_feature_and_the_token_after_it() -> None:
    labels = label_rows(_batch(), _prediction([2, 3], [1, 1]))
    assert labels.features(_features())[0, :, 0].tolist() == [2, 3]
    assert labels.tokens[0].tolist() == [103, 104]


def test_labels_whose_next_token_is_of_another_document_do_not_count() -> None:
    # h_3 is about token 4, the document's last; h_4 would be about the next document.
    assert _valid([3, 4, 5, 6, 7], [2, 3, 5, 5, 6]) == [True, False, True, True, False]


def test_a_row_whose_newest_input_is_of_another_document_does_not_count() -> None:
    assert _valid([5, 6, 6], [4, 4, 5]) == [False, False, True]


def test_labels_outside_the_sequence_do_not_count() -> None:
    whole = _batch()._replace(
        documents=torch.zeros(1, 10, dtype=torch.long),
        loss_mask=torch.ones(1, 10, dtype=torch.bool),
    )
    assert _valid([-1, 8, 9, 12], [0, 7, 8, 8], whole) == [False, True, False, False]
    assert _valid([3, 3], [-1, 11], whole) == [False, False]


def test_padding_never_counts() -> None:
    given = _batch()._replace(loss_mask=torch.ones(1, 10, dtype=torch.bool))
    assert _valid([8], [8], given) == [False]


def test_only_tokens_that_are_to_be_learnt_count() -> None:
    mask = _batch().loss_mask.clone()
    mask[0, 3] = False
    # The mask is that of the predicted token, label + 1.
    assert _valid([1, 2, 3], [0, 1, 2], _batch()._replace(loss_mask=mask)) == [True, False, True]


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
    features = _features()
    valid = torch.ones(1, 2, dtype=torch.bool)
    alone = _prediction([2, 3], [1, 1])
    assert with_own_features(features, alone, valid, 1.0, torch.Generator()) is features


def test_a_batch_is_repeated_along_its_sequences_with_one_index() -> None:
    batch, features = repeated(_batch(), _features(), 3)
    for name in ("tokens", "loss_mask", "documents", "positions"):
        whole, one = getattr(batch, name), getattr(_batch(), name)
        assert torch.equal(whole, torch.cat([one] * 3))
    assert torch.equal(features, torch.cat([_features()] * 3))
    assert int(batch.index) == int(_batch().index)


def test_a_batch_repeated_once_is_itself() -> None:
    given, features = _batch(), _features()
    same, same_features = repeated(given, features, 1)
    assert same is given
    assert same_features is features
