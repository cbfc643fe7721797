"""EAGLE's heads as others train and publish them.

A folder numbers the layers of EAGLE-3 in one of two ways: vLLM and speculators as we do, by
``eagle_aux_hidden_state_layer_ids`` at the top of its configuration; SGLang and SpecForge one less,
inside ``eagle_config``. One that says nothing means a low, a middle and a high layer.
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
    rope_base,
    same_rows,
    take_table,
    take_vocabulary,
)
from falcon_lab.interfaces import ImportFormat, StrangersFolder, TrainedDrafter
from falcon_lab_eagle.eagle3 import official_taps
from falcon_lab_eagle.exports import BLOCKS, TAPS, eagle3_names

LLAMA_BASE, LLAMA_EPS = 10_000.0, 1e-6
"""What transformers gives a Llama whose configuration does not say them."""
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
LAYERS = ("midlayer", "layers.0")
"""What programs call EAGLE-3's decoder layer."""
FIRST = "layers.0.self_attn.q_proj.weight"
"""A tensor of every EAGLE-1."""


class Eagle3Folder(ImportFormat):
    """EAGLE-3, whoever has trained it."""

    programs = "vLLM, SGLang, SpecForge, speculators and EAGLE-3's authors"

    def recognises(self, folder: StrangersFolder) -> bool:
        """Return whether its decoder layer has a norm for hidden states."""
        return "fc.weight" in folder.tensors and _layer(folder) is not None

    def options(self, folder: StrangersFolder, host: Any) -> dict[str, Any]:
        """Return layers, sizes, norms and LM head, and the size of the draft vocabulary."""
        check_sizes(folder, host)
        what = "EAGLE-3"
        folder.expect("num_hidden_layers", 1, what=what)
        folder.expect("hidden_act", "silu", what=what)
        for key in ("attention_bias", "mlp_bias", "norm_before_fc", "fc_norm", "norm_output"):
            folder.expect(key, False, what=what)
        folder.expect("logit_scale", 1, what=what)
        folder.expect("sliding_window", what=what)
        folder.expect("quantization_config", what=what)
        folder.expect("norm_before_residual", True, False, what=what)
        if (folder.section("eagle_config") or {}).get("use_aux_hidden_state") is False:
            raise FalconLabError(
                "its config.json says that it reads no layers of the target "
                "(use_aux_hidden_state: false), and EAGLE-3 of ours reads three"
            )
        of_speculators = "speculators_model_type" in folder.config
        normed = folder.config.get("norm_before_residual")
        ids = _peek_vocabulary(folder, host.vocab_size)
        head = folder.tensors.get("lm_head.weight")
        return {
            "taps": taps_of(folder, host.config.num_hidden_layers),
            "head": "target" if head is None or _target_s(head, ids, host) else "own",
            "draft_vocabulary": None if ids is None else len(ids),
            "norm_before_residual": of_speculators if normed is None else normed,
            "eps": float(folder.number("rms_norm_eps", LLAMA_EPS)),
            **layer_options(folder, host, LLAMA_BASE),
        }

    def read(self, folder: StrangersFolder, drafter: TrainedDrafter) -> dict[str, Tensor]:
        """Map names; embeddings must be the target's."""
        tables = plain_tables(drafter.host)
        take_table(folder, "embed_tokens.weight", tables.embeddings, "embeddings")
        ids = take_vocabulary(folder, drafter.host.vocab_size)
        names = eagle3_names(str(_layer(folder)))
        ours = {mine: folder.take(theirs) for mine, theirs in names.items()}
        if drafter.config.head == "own":
            ours["head.weight"] = folder.take("lm_head.weight")
        else:
            folder.tensors.pop("lm_head.weight", None)  # compared by ``options``
        if ids is not None:
            ours[IDS] = ids
        return ours


def _layer(folder: StrangersFolder) -> str | None:
    """Return what a folder calls EAGLE-3's decoder layer; None where it has none."""
    known = (each for each in LAYERS if f"{each}.hidden_norm.weight" in folder.tensors)
    return next(known, None)


def _peek_vocabulary(folder: StrangersFolder, vocabulary: int) -> Tensor | None:
    """Return the draft vocabulary, and leave it where it is."""
    copy = StrangersFolder(folder.path, folder.config, dict(folder.tensors))
    return take_vocabulary(copy, vocabulary)


def _target_s(head: Tensor, ids: Tensor | None, host: Any) -> bool:
    """Return whether an LM head has the rows of the target's."""
    rows = plain_tables(host).head
    if ids is None:
        return same_rows(head, rows)
    inside = bool(((ids >= 0) & (ids < len(rows))).all())
    return inside and same_rows(head, rows[ids])


def taps_of(folder: StrangersFolder, layers: int) -> list[int]:
    """Return the layers that are read, as ours are counted.

    Raises:
        FalconLabError: nobody says them, or the target lacks one.
    """
    inside = (folder.section("eagle_config") or {}).get(IDS_KEY)
    if folder.taps is not None:
        found = list(folder.taps)
    elif above := folder.config.get(IDS_KEY):
        found = folder.numbers(IDS_KEY, above)
    elif inside:
        found = [each + 1 for each in folder.numbers(f"eagle_config.{IDS_KEY}", inside)]
    else:
        found = list(official_taps(layers))
    if len(found) != TAPS or sorted({*found}) != found or not 0 <= found[0] <= found[-1] < layers:
        raise FalconLabError(
            f"its taps are unknown: it would read the layers {found}, and the target can be read "
            f"at 0 to {layers - 1}; name {TAPS} ascending ones by --taps"
        )
    return found


class EagleFolder(ImportFormat):
    """EAGLE-1 as its authors publish it, and as vLLM and SGLang read it."""

    programs = "EAGLE's authors, vLLM and SGLang"

    def recognises(self, folder: StrangersFolder) -> bool:
        """Return whether a map fuses two states before decoder layers without a norm for them."""
        fuse = folder.tensors.get("fc.weight")
        normed = "hidden_norm.weight" in folder.tensors or _layer(folder) is not None
        if fuse is None or FIRST not in folder.tensors or normed:
            return False
        return fuse.ndim == 2 and fuse.shape[1] == 2 * fuse.shape[0]

    def options(self, folder: StrangersFolder, host: Any) -> dict[str, Any]:
        """Return the number of layers and whether the map has a bias."""
        check_sizes(folder, host)
        what, theirs = "EAGLE-1", host.config
        base = getattr(theirs, "rope_parameters", None) or {}
        folder.expect("hidden_act", getattr(theirs, "hidden_act", None), what=what)
        folder.expect("logit_scale", 1, what=what)
        folder.expect("quantization_config", what=what)
        folder.expect("rms_norm_eps", getattr(theirs, "rms_norm_eps", None), what=what)
        if base.get("rope_type", "default") == "default":
            own = rope_base(folder, LLAMA_BASE)
            if own != base.get("rope_theta", own):
                raise FalconLabError(
                    f"its rotary embeddings have the base {own:g}, and its blocks would be the "
                    f"target's own, with {base['rope_theta']:g}"
                )
        elif folder.config.get("rope_parameters") != base:
            raise FalconLabError(
                "the target's rotary embeddings are scaled, and its config.json does not say the "
                "same of its own"
            )
        numbers = {int(found[1]) for name in folder.tensors if (found := LAYER.match(name))}
        return {"layers": len(numbers), "form": "published", "bias": "fc.bias" in folder.tensors}

    def read(self, folder: StrangersFolder, drafter: TrainedDrafter) -> dict[str, Tensor]:
        """Map names; embeddings and LM head must be the target's."""
        tables = plain_tables(drafter.host)
        take_table(folder, "embed_tokens.weight", tables.embeddings, "embeddings")
        take_table(folder, "lm_head.weight", tables.head, "LM head")
        ours = {"fuse.mix.weight": folder.take("fc.weight")}
        if drafter.config.bias:
            ours["fuse.mix.bias"] = folder.take("fc.bias")
        known = drafter.drafter.state_dict()
        for name in [each for each in folder.tensors if LAYER.match(each)]:
            if BLOCKS + name.removeprefix("layers.") in known:
                ours[BLOCKS + name.removeprefix("layers.")] = folder.take(name)
        return ours


LAYER = re.compile(r"layers\.(\d+)\.")
