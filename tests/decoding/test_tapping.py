"""A drafter that taps layers observes their hidden states, in every way of decoding."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from distilling import batch, distillation
from fakes.decoding import chain, generate, plain, speculative
from fakes.drafters import OracleDrafter, TrainedAlone
from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import DrafterInputs, Observation, Prediction
from falcon_lab.model.target import Target
from falcon_lab.sampling import Sampling
from falcon_lab.studies.tune.texts import Reader, write_texts
from tiny_models import tiny_target

TAPS = (1, 0)
PROMPTS = ([7, 9, 4, 3, 12, 5, 6], [12, 3])


@cache
def target() -> Target:
    return tiny_target()


def states(tokens: list[int]) -> Tensor:
    """``[T, L, H]``, as the model says."""
    with torch.no_grad():
        found = target().model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    return torch.stack([found.hidden_states[layer][0] for layer in TAPS], dim=1)


class Tapping(OracleDrafter):
    """Compares what it observes with what the model computes of its text."""

    taps = TAPS
    needs = frozenset[str]()
    told = 0

    def observe(self, observation: Observation) -> None:
        first = len(self.text) - 1
        self.text += observation.tokens.tolist()
        assert observation.features is None
        assert observation.taps is not None
        expected = states(self.text[:-1])[first:]
        torch.testing.assert_close(observation.taps, expected, atol=5e-5, rtol=1e-5)
        type(self).told += len(expected)


def tapping(prompt: list[int]) -> tuple[Tapping, list[int]]:
    """A drafter that mostly knows what the target writes, and that."""
    answer = plain(target(), prompt, 16).tokens
    return Tapping(64, 2, prompt + answer), answer


@pytest.mark.parametrize("chunk", [3, 2048])
def test_an_engine_tells_its_drafter(chunk: int) -> None:
    drafter, answer = tapping(PROMPTS[0])
    engine = speculative(target(), drafter, chain(4))
    engine.decoding = DecodingConfig(prefill_chunk=chunk)
    before = Tapping.told
    found = generate(engine, PROMPTS[0], 16)
    assert found.tokens == answer
    assert len(found.rounds) < 15
    assert Tapping.told - before == len(PROMPTS[0]) + len(answer) - 1


def test_a_batch_tells_every_row() -> None:
    drafter, answer = tapping(PROMPTS[0])
    found = speculative(target(), drafter, chain(3)).generate_batch(
        [torch.tensor(prompt) for prompt in PROMPTS],
        batch_size=2,
        max_new_tokens=16,
        sampling=Sampling(),
        generators=[torch.Generator(), torch.Generator()],
        stop=StopCondition(),
    )
    assert [one.tokens for one in found] == [answer, plain(target(), PROMPTS[1], 16).tokens]


def test_a_text_that_is_read_again_tells_it() -> None:
    drafter, _ = tapping(PROMPTS[0])
    engine = speculative(target(), drafter, chain(2))
    prompts = [torch.tensor(PROMPTS[0])]
    [text] = write_texts(engine.target, prompts, 9, StopCondition(), DecodingConfig())
    reader = Reader(text, drafter)
    reader.advance(3)
    assert drafter.text == text.tokens[: len(PROMPTS[0]) + 4].tolist()


class Student(nn.Module, TrainedAlone):
    """Keeps what it was taught with."""

    taps = TAPS

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.inputs: list[DrafterInputs] = []

    def forward(self, inputs: DrafterInputs, reveal: object = None) -> Prediction:
        self.inputs.append(inputs)
        column = torch.arange(inputs.tokens.shape[1]).expand_as(inputs.tokens)
        zeros = torch.zeros_like(column)
        features = inputs.features * self.weight
        return Prediction(features, None, column + 1, column, zeros, column)


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_student_is_taught_with_them(repeats: int) -> None:
    student, given = Student(), batch(3)
    step = distillation(drafter=student, target=target(), repeats=repeats).step(given)
    step.train(0.0)
    [inputs] = student.inputs
    assert inputs.taps is not None
    assert inputs.taps.shape == (2 * repeats, 23, 2, 32)
    first = given.tokens[1, :8].tolist()  # the first document of a sequence
    for row in range(1, 2 * repeats, 2):
        torch.testing.assert_close(inputs.taps[row, :8], states(first), atol=5e-5, rtol=1e-5)


def test_features_from_a_store_are_not_enough_for_it() -> None:
    module = distillation(drafter=Student(), target=target())
    stored = batch(3)._replace(features=torch.zeros(2, 24, 32))
    with pytest.raises(FalconLabError, match=r"data\.feature_store=null"):
        module.step(stored).train(0.0)
