"""A proof, when a target is loaded, that it can be verified by a tree mask.

Whether a family reads position ids, takes a 4-D mask, keeps nothing outside the cache and has no
unknown scale on its logits is not written in any configuration. A few tokens show it.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.targets.target import Target
from falcon_lab.trees.token_tree import TokenTree, ancestor_matrix

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
    except FalconLabError:
        raise
    except Exception as error:  # whatever a model of an unknown kind raises
        raise FalconLabError(
            f"{target.name} ({target.config.model_type}) cannot be a target: it cannot be run "
            f"with explicit positions, mask and cache ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]})"
        ) from error


def _tokens(target: Target) -> Tensor:
    """Six tokens, spread over the vocabulary and the same every time."""
    spread = [(7919 * i + 1) % target.vocab_size for i in range(6)]
    return torch.tensor(spread, device=target.device)


def _by_tree(target: Target, tokens: Tensor) -> Tensor:
    """Logits of tokens 2..5: a prefix of two, a tree with a stray branch, a commit, a step."""
    cache = target.new_cache(8)
    target.prefill(tokens[:2], cache)
    parents = torch.tensor([-1, 0, 0, 2], device=tokens.device)
    path = torch.tensor([0, 2, 3], device=tokens.device)
    tree = TokenTree(
        tokens=tokens[torch.tensor([2, 5, 3, 4], device=tokens.device)],
        parents=parents,
        depth=torch.tensor([0, 1, 1, 2], device=tokens.device),
        ancestors=ancestor_matrix(parents),
        proposal="deterministic",
        log_q=torch.zeros(4, device=tokens.device),
    )
    verified = target.verify(tree, cache).logits[path]
    cache.commit(2, path)
    return torch.cat([verified, target.step(tokens[5], cache).logits])


def _compare(target: Target, ours: Tensor, expected: Tensor, what: str) -> None:
    scale = expected.float().abs().max()
    off = (ours.float() - expected.float()).abs().max() / scale
    # NaN compares false: it is refused as well.
    if not bool(off <= TOLERANCE.get(target.dtype, 1e-1)):
        raise FalconLabError(
            f"{target.name} ({target.config.model_type}) cannot be a target: {what} gives other "
            f"logits than the model itself (off by {float(off):.1%} of the largest one)"
        )
