"""What the drafter reads in one pass of a step, and the seeds of everything random about it.

Everything random about a step follows from the run's seed, the batch and the process, never from
what happened before, so that a resumed run equals an uninterrupted one.

Shapes: B sequences, T tokens, R prediction rows, L tapped layers, H hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from falcon_lab.data.packing import Batch
from falcon_lab.interfaces import DrafterInputs, Prediction


def repeated(batch: Batch, features: Tensor, times: int) -> tuple[Batch, Tensor]:
    """Return a batch and its ``[B, T, H]`` features, ``times`` times along B.

    A position has a given slot of a block in one phase of k only; with several phases of one batch
    a single teacher pass trains every slot at every position.
    """
    if times == 1:
        return batch, features
    tokens, loss_mask, documents, positions = (
        values.repeat(times, 1)
        for values in (batch.tokens, batch.loss_mask, batch.documents, batch.positions)
    )
    return Batch(tokens, loss_mask, documents, positions, batch.index), features.repeat(times, 1, 1)


def drafter_inputs(
    batch: Batch,
    features: Tensor,
    noise: float,
    generators: tuple[torch.Generator, ...],
    taps: Tensor | None = None,
) -> DrafterInputs:
    """Pair every feature with the token after it: (x_{t+1}, h_t), one fewer than the tokens.

    Args:
        batch: packed documents.
        features: ``[B, T, H]`` of the target.
        noise: features get uniform noise in (-noise, noise).
        generators: of the noise, and the one that the drafter is given.
        taps: ``[B', T, L, H]`` of the target, where B' sequences are B once or several times over.
    """
    of_noise, of_drafter = generators
    noisy = features[:, :-1]
    if noise:
        uniform = torch.rand(noisy.shape, generator=of_noise, device=of_noise.device)
        noisy = noisy + ((2 * uniform - 1) * noise).to(noisy)
    return DrafterInputs(
        tokens=batch.tokens[:, 1:],
        features=noisy,
        documents=batch.documents[:, :-1],
        positions=batch.positions[:, :-1],
        generator=of_drafter,
        taps=None if taps is None else taps[:, :-1].repeat(len(noisy) // len(taps), 1, 1, 1),
    )


def with_own_features(
    features: Tensor,
    prediction: Prediction,
    valid: Tensor,
    share: float,
    generator: torch.Generator,
) -> Tensor:
    """Replace the features of some whole blocks by the drafter's own predictions.

    In every drafting pass but the first the drafter reads features that it predicted itself, a
    block of them at a time. Reading some in training teaches it to continue from its own errors.

    Args:
        features: ``[B, T, H]`` of the target.
        prediction: of a first pass.
        valid: ``[B, R]`` bool, rows whose prediction may be used.
        share: chance that a block is replaced.
        generator: draws the blocks.
    """
    if prediction.features is None:
        return features
    shape = (prediction.group.shape[0], int(prediction.group.max()) + 1)
    drawn = torch.rand(shape, generator=generator, device=generator.device) < share
    replaced = drawn.to(valid.device).gather(1, prediction.group) & valid
    row = replaced.nonzero(as_tuple=True)
    mixed = features.clone()
    mixed[row[0], prediction.label[row]] = prediction.features[row].to(mixed)
    return mixed


# --- seeds ----------------------------------------------------------------------------------------


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed made of names and numbers; other parts give an unrelated one."""
    text = "\x1f".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(*parts: int | str) -> torch.Generator:
    """Return a new CPU generator for a purpose; the same parts give the same numbers."""
    return torch.Generator().manual_seed(derive_seed(*parts))


@contextmanager
def seeded_dropout(seed: int, device: torch.device) -> Iterator[None]:
    """Start torch's global generators from ``seed``, and restore them afterwards.

    Dropout takes no generator; with the same seed two passes have the same dropout masks.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
