"""One packed sequence whose labels can be checked by eye."""

import torch
from torch import Tensor

from falcon_lab.data.packing import Batch
from falcon_lab.interfaces import Prediction


def one_batch() -> Batch:
    """One sequence: a document of 5 tokens, one of 3, two tokens of padding."""
    tokens = torch.arange(100, 110)[None]
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1, -1]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]])
    return Batch(tokens, documents >= 0, documents, positions, torch.tensor(0))


def position_features() -> Tensor:
    return torch.arange(10.0).view(1, 10, 1).expand(1, 10, 3)


def one_prediction(label: list[int], source: list[int]) -> Prediction:
    zeros = torch.zeros(1, len(label), dtype=torch.long)
    rows = torch.tensor([label]), torch.tensor([source])
    return Prediction(None, None, *rows, slot=zeros, group=zeros)
