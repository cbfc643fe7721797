"""Prove with a few tokens that a loaded model can be a target.

Whether a family reads position ids, supports a 4-D mask, stores nothing outside the cache and has
no unknown scale on its logits is not written in any configuration.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.config.schema import dtype_name
from falcon_lab.errors import FalconLabError, one_line
from falcon_lab.model.target import Target
from falcon_lab.tree import TokenTree, ancestor_matrix

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Share of the largest logit by which two kernels may differ; a wrong mask is far beyond it."""


@torch.no_grad()
def check_target(target: Target) -> None:
    """Compare our ways of reading six tokens with the model's own.

    Raises:
        FalconLabError: when they disagree or the model cannot be called so, with the reason.
    """
    tokens = _tokens(target)
    positions = torch.arange(tokens.shape[0], device=tokens.device)[None]
    try:
        expected = target.model(input_ids=tokens[None], use_cache=False).logits[0]
        packed = target.teacher(tokens[None], torch.zeros_like(positions), positions)[0]
        _compare(target, target.head(packed), expected, "its LM head on our features")
        _compare(target, _by_tree(target, tokens), expected[2:], "a verified tree of drafts")
        _check_window(target, tokens, positions)
    except FalconLabError:
        raise
    except Exception as error:  # whatever a model of an unknown kind raises
        reason = f"{type(error).__name__}: {one_line(error)[:300]}"
        raise _no_target(
            target, f"it cannot be run with explicit positions, mask and cache ({reason})"
        ) from error


def _check_window(target: Target, tokens: Tensor, positions: Tensor) -> None:
    """Compare the same under a window of three tokens, where the configuration has a window.

    Some families have one in their configuration that Hugging Face's cache cuts by, and that their
    attention knows nothing of: what they write depends on how they are called.
    """
    backbone = target.backbone
    if backbone.window is None:
        return
    window, backbone.window = backbone.window, 3
    try:
        backbone.config.sliding_window = 3
        expected = target.model(input_ids=tokens[None], use_cache=False).logits[0]
        packed = target.teacher(tokens[None], torch.zeros_like(positions), positions)[0]
    finally:
        backbone.config.sliding_window = backbone.window = window
    if _difference(target, target.head(packed), expected):
        raise FalconLabError(
            f"target {target.name}: its config.json has a sliding_window of {window}, which "
            f"{target.config.model_type} knows nothing of and Hugging Face's cache cuts by; set it "
            f"to the {target.max_positions} positions that the model was made for"
        )


def _tokens(target: Target) -> Tensor:
    """Return six tokens, spread over the vocabulary and the same every time."""
    spread = [(7919 * i + 1) % target.vocab_size for i in range(6)]
    return torch.tensor(spread, device=target.device)


def _by_tree(target: Target, tokens: Tensor) -> Tensor:
    """Return logits of tokens 2..5: a prefix of two, a tree with a side branch, commit, step."""
    cache = target.new_cache(8)
    target.prefill(tokens[:2], cache)
    parents = torch.tensor([-1, 0, 0, 2], device=tokens.device)
    path = [0, 2, 3]
    tree = TokenTree(
        tokens=tokens[torch.tensor([2, 5, 3, 4], device=tokens.device)],
        parents=parents,
        depth=torch.tensor([0, 1, 1, 2], device=tokens.device),
        ancestors=ancestor_matrix(parents),
        proposal="deterministic",
        log_q=torch.zeros(4, device=tokens.device),
    )
    verified = target.verify(tree, cache).logits[path]
    cache.commit([2], [path])
    return torch.cat([verified, target.step(tokens[5], cache).logits])


def _compare(target: Target, ours: Tensor, expected: Tensor, what: str) -> None:
    if not bool(expected.isfinite().all()):
        dtype = dtype_name(target.dtype)
        raise _no_target(
            target,
            "its logits are not finite: its weights are damaged (fetch or save them again), or "
            f"target.dtype={dtype} has no room for its numbers",
        )
    if off := _difference(target, ours, expected):
        raise _no_target(
            target,
            f"{what} gives other logits than the model itself (off by {off} of the largest one)",
        )


def _difference(target: Target, ours: Tensor, expected: Tensor) -> str | None:
    """Return by how much logits differ, beyond what kernels round differently; None: they agree."""
    scale = expected.float().abs().max()
    off = float((ours.float() - expected.float()).abs().max() / scale)
    # NaN compares false: it is refused as well.
    return None if off <= TOLERANCE.get(target.dtype, 1e-1) else f"{off:.1%}"


def _no_target(target: Target, reason: str) -> FalconLabError:
    return FalconLabError(
        f"{target.name} ({target.config.model_type}) cannot be a target: {reason}; choose a target "
        "of another family"
    )
