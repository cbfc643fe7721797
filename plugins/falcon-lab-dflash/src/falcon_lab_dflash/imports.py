"""DFlash's heads as others train and publish them.

A published head has the mask's embedding in the target's own table, by the number of a token that
no text has; engines and we may have it apart.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.export.mapping import (
    IDS,
    check_sizes,
    layer_options,
    plain_tables,
    take_table,
    take_vocabulary,
    unpickled,
)
from falcon_lab.interfaces import ImportFormat, StrangersFolder, TrainedDrafter
from falcon_lab_dflash.exports import MASK, dflash_names

QWEN_BASE, QWEN_EPS = 1_000_000.0, 1e-6
"""What programs take where a configuration does not say them."""
LAYER = re.compile(r"layers\.(\d+)\.")
QUERY = "layers.0.self_attn.q_norm.weight"
"""A tensor that EAGLE-3's heads lack."""


class DFlashFolder(ImportFormat):
    """DFlash, whoever has trained it."""

    programs = "DFlash's authors, vLLM, SGLang and speculators"

    def recognises(self, folder: StrangersFolder) -> bool:
        """Return whether fused states have a norm, and queries have one in the layers."""
        return {"fc.weight", "hidden_norm.weight", QUERY} <= set(folder.tensors)

    def options(self, folder: StrangersFolder, host: Any) -> dict[str, Any]:
        """Return block, layers, taps, sizes and norms."""
        check_sizes(folder, host)
        what, given = "DFlash", _own(folder)
        for key in ("attention_bias", "use_sliding_window"):
            folder.expect(key, False, what=what)
        folder.expect("hidden_act", "silu", what=what)
        folder.expect("is_neox_style", True, what=what)
        folder.expect("quantization_config", what=what)
        listed = folder.config.get("layer_types") or []
        kinds = {str(each) for each in (listed if isinstance(listed, list) else [listed])}
        for key, plain in PLAIN.items():
            if given.get(key) not in (None, plain):
                raise FalconLabError(
                    f"its dflash_config has {key}: {given[key]!r}, and DFlash of ours knows {plain}"
                )
        if kinds - {"full_attention"}:
            raise FalconLabError(
                f"its layers are {', '.join(sorted(kinds))}, and DFlash of ours has full "
                "attention alone"
            )
        ids = take_vocabulary(
            StrangersFolder(folder.path, folder.config, dict(folder.tensors)), host.vocab_size
        )
        numbers = {int(found[1]) for name in folder.tensors if (found := LAYER.match(name))}
        return {
            "block": folder.count("block_size") - 1,
            "layers": len(numbers),
            "taps": taps_of(folder, host.config.num_hidden_layers),
            "draft_vocabulary": None if ids is None else len(ids),
            "eps": float(folder.number("rms_norm_eps", QWEN_EPS)),
            **layer_options(folder, host, QWEN_BASE),
        }

    def read(self, folder: StrangersFolder, drafter: TrainedDrafter) -> dict[str, Tensor]:
        """Map names; the mask is a row of the target's table unless a file has it."""
        tables = plain_tables(drafter.host)
        ids = take_vocabulary(folder, drafter.host.vocab_size)
        rows = tables.head if ids is None else tables.head[ids]
        take_table(folder, "embed_tokens.weight", tables.embeddings, "embeddings")
        take_table(folder, "lm_head.weight", rows, "LM head")
        names = dflash_names(drafter.config.layers)
        ours = {mine: folder.take(theirs) for mine, theirs in names.items()}
        dtype = ours["model.fuse.weight"].dtype
        ours["mask"] = mask_of(folder, tables.embeddings).to(dtype)
        if ids is not None:
            ours[IDS] = ids
        return ours


PLAIN = {
    **{"causal": False, "sample_from_anchor": False, "use_swa": False},
    **{"attention_sink_bias": False, "attention_value_scale": 1},
}
"""Settings of a head, and what ours is."""


def _own(folder: StrangersFolder) -> dict[str, Any]:
    """Return the settings that are DFlash's, which speculators has among the others."""
    inner = folder.section("dflash_config")
    return folder.config if inner is None else inner


def taps_of(folder: StrangersFolder, layers: int) -> list[int]:
    """Return the layers that are read, as ours are counted.

    Raises:
        FalconLabError: nobody says them, or the target lacks one.
    """
    given, above = _own(folder), "aux_hidden_state_layer_ids"
    if folder.taps is not None:
        found = list(folder.taps)
    elif ids := given.get("target_layer_ids"):
        found = [each + 1 for each in folder.numbers("target_layer_ids", ids)]
    else:
        found = folder.numbers(above, folder.config.get(above, []))
    if not found or sorted({*found}) != found or not 0 <= found[0] <= found[-1] < layers:
        raise FalconLabError(
            f"its taps are unknown: it would read the layers {found}, and the target can be read "
            f"at 0 to {layers - 1}; name ascending ones by --taps"
        )
    return found


def mask_of(folder: StrangersFolder, embeddings: Tensor) -> Tensor:
    """Return the embedding of what is to be drafted, ``[H]``.

    Raises:
        FalconLabError: it is neither in a file nor in the target's table.
    """
    file = folder.path / MASK
    if file.is_file():
        state = unpickled(file)
        found = state.get("embedding") if isinstance(state, dict) else state
        if isinstance(found, Tensor) and found.numel() == embeddings.shape[1]:
            return found.reshape(-1)
        raise FalconLabError(f"its {MASK} holds no embedding of {embeddings.shape[1]} numbers")
    token = _own(folder).get("mask_token_id", folder.config.get("mask_token_id"))
    if type(token) is not int or not 0 <= token < len(embeddings):
        raise FalconLabError(
            f"its mask_token_id is {token!r}, which is no token of the target, and it has no {MASK}"
        )
    return embeddings[token].clone()
