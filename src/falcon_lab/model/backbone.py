"""The decoder blocks of a Hugging Face model, called with explicit positions, mask and cache.

The target and the drafter's decoder blocks are both one of these. Nothing is patched: a base
model accepts a ready-made 4-D mask, or a mapping of them where its layers differ in kind. Decoding
goes the short way through Llama-like layers (``lean.py``).

Shapes: B batch, T new tokens, S keys (cached ones and the new ones), L tapped layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from falcon_lab.errors import FalconLabError, one_line
from falcon_lab.interfaces import LayerPlan
from falcon_lab.model.alibi import biased, with_bias_in_masks
from falcon_lab.model.attention.backend import widened
from falcon_lab.model.attention.merged import Merged
from falcon_lab.model.attention.registration import BLOCK_SPARSE, OURS, backend_of
from falcon_lab.model.families import FULL, SLIDING, layer_kinds, short_config
from falcon_lab.model.kv_cache import BatchCache, KVCache
from falcon_lab.model.kv_layout import KVLayout
from falcon_lab.model.lean import WHOLE, LeanLayers
from falcon_lab.model.masks import for_attention, windowed
from falcon_lab.model.memory import check_room

if TYPE_CHECKING:
    from falcon_lab.model.partial import PartialModel


class Taps:
    """Collects the hidden states of some layers while a pass goes through all of them.

    Args:
        layers: which.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._seen: dict[int, Tensor] = {}

    def see(self, layer: int, hidden: Tensor) -> None:
        """Store ``[B, T, H]`` if the layer is one of those wanted."""
        if layer in self.layers:
            self._seen[layer] = hidden

    def see_all(self, states: Sequence[Tensor] | None, count: int) -> None:
        """Store those wanted of a Hugging Face model's ``hidden_states``.

        Args:
            states: of every layer, the embeddings first.
            count: decoder layers of the model.
        """
        if states is None or len(states) != count + 1:
            raise FalconLabError(
                "the target's model does not return the hidden states of its layers, which this "
                "drafter reads; choose another target or another drafter"
            )
        for layer in self.layers:
            self._seen[layer] = states[layer]

    def stacked(self) -> Tensor:
        """Return ``[B, T, L, H]``, in the order of ``layers``."""
        return torch.stack([self._seen[layer] for layer in self.layers], dim=-2)


class Backbone(nn.Module):
    """A Hugging Face base model behind one keyword-only call.

    Attributes:
        base: the base model, from embeddings to the norm before the LM head.
        config: its (text) configuration.
        kinds: the kinds of attention among its layers, ``full_attention`` or
            ``sliding_attention``.
        window: positions that a sliding layer attends to, or None.
        lean: the short way through the layers, or None.

    Args:
        base: the base model.
        lean: take the short way where the model allows it, there is a cache and no gradient.
        width: channels of ``embeddings``, for a base model without an embedding table; None: it
            has one.
    """

    def __init__(self, base: Any, *, lean: bool = False, width: int | None = None) -> None:
        super().__init__()
        base, self._slopes = with_bias_in_masks(base)
        self.base = base
        self.lean = LeanLayers.of(base) if lean else None
        self.config: Any = base.config
        self.kinds = layer_kinds(self.config)
        self.window: int | None = self.config.sliding_window if SLIDING in self.kinds else None
        self._width = width
        self._layout: tuple[torch.dtype, KVLayout] | None = None  # dtype of the weights, and its
        self._parts: dict[LayerPlan, PartialModel] = {}
        self._everything: Tensor | None = None  # a mask row of all keys, in the kernel's form

    def __getstate__(self) -> dict[str, Any]:
        """Leave partial models out: they are made of this one's own modules."""
        return {**vars(self), "_parts": {}}

    @classmethod
    def short(cls, config: Any, layers: int) -> Self:
        """Return fresh decoder layers of a model's own kind, each with full attention.

        They take ``embeddings`` and have no embedding table. Weights are float32, drawn from
        torch's global generator; ``config`` is left as it is.
        """
        from transformers import AutoModel

        shortened = short_config(config, layers)
        if getattr(shortened, "hidden_size_per_layer_input", None):
            shortened.hidden_size_per_layer_input = 0  # Gemma 4 looks them up by the token
        with of_the_kind(config, "decoder blocks"):
            attention = fresh_attention(config)
            make = partial(
                AutoModel.from_config,
                shortened,
                attn_implementation=attention,
                dtype=torch.float32,
            )
            check_room(shortened, make, f"drafter.layers is {layers}")
            base = make()
            base.set_input_embeddings(None)
            made = cls(base, lean=True, width=shortened.hidden_size)
            made.check_layers(layers)
        return made

    def check_layers(self, layers: int) -> None:
        """Check by a pass over one token that fresh decoder layers can be called.

        Those without storage (an outline's) are not called.

        Raises:
            ValueError: there are more or fewer of them than asked for.
        """
        weight = next(self.base.parameters())
        if weight.is_meta:
            return
        training = self.training
        self.eval()  # dropout would draw random numbers
        stored = len(self._measured_layout(weight).layers)
        self.train(training)
        if stored != layers:
            raise ValueError(f"{stored} layers store keys and values where {layers} should")

    @property
    def implementation(self) -> str:
        """Return the name of the attention kernel."""
        return str(self.config._attn_implementation)

    @property
    def final_norm(self) -> nn.Module:
        """Return the module that makes the features of the last layer's hidden states.

        Raises:
            FalconLabError: it has none of the names that are known.
        """
        from falcon_lab.model.partial import final_norm_of

        return final_norm_of(self.base)[1]

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        """Return the decoder layers, from the first on.

        Raises:
            FalconLabError: the layers are in no list of the base model's own.
        """
        from falcon_lab.model.partial import layers_of

        return list(layers_of(self.base)[1])

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache for ``capacity`` positions."""
        return KVCache(self.config.num_hidden_layers, capacity, self.layout)

    @property
    def layout(self) -> KVLayout:
        """Return what a cache stores of every position, with the weights as they are now.

        Found once, by a pass over one token.
        """
        weight = next(self.base.parameters())
        if self._layout is None or self._layout[0] != weight.dtype:
            self._layout = weight.dtype, self._measured_layout(weight)
        return self._layout[1]

    @torch.no_grad()
    def _measured_layout(self, weight: Tensor) -> KVLayout:
        seen = KVCache(self.config.num_hidden_layers, 1)
        first = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
        nothing = None if self._width is None else weight.new_zeros(1, 1, self._width)
        tokens = first if self._width is None else None
        self.forward(positions=first, mask=None, tokens=tokens, embeddings=nothing, cache=seen)
        return seen.layout

    def new_batch_cache(self, sequences: int, capacity: int) -> BatchCache:
        """Return an empty cache of B sequences of up to ``capacity`` positions each."""
        return BatchCache(self.config.num_hidden_layers, sequences, capacity, self.layout)

    def forward(
        self,
        *,
        positions: Tensor,
        mask: Tensor | None,
        tokens: Tensor | None = None,
        embeddings: Tensor | None = None,
        cache: KVCache | None = None,
        causal: bool = False,
        taps: Taps | None = None,
        plan: LayerPlan = WHOLE,
    ) -> Tensor:
        """Return the hidden states after the final norm, as the LM head reads them.

        Args:
            positions: ``[B or 1, T]`` long.
            mask: ``[B or 1, T, W]`` bool attention mask over the last W keys (the new ones at
                least); every new token attends to the S - W before them. The window of sliding
                layers is written in here. None: every new token attends to every key.
            tokens: ``[B, T]`` long, or
            embeddings: ``[B, T, H]``; what layer ``plan.first`` reads, where that is not the first.
            cache: earlier keys and values, to which the new ones are appended.
            causal: ``mask`` is ``[1, T, T]`` and a text's own, which some kernels know by
                themselves.
            taps: collects the hidden states of layers on the way, of whole passes.
            plan: which layers a pass with a cache goes through, and what of them.

        Returns:
            ``[B, T, H]``; where the plan ends before the final norm, what the next layer would
            read.
        """
        if embeddings is not None:
            embeddings = embeddings.contiguous()  # mixtures of experts view a pass as rows
        dtype = self._mask_dtype(embeddings)
        new = positions.shape[1]
        seen = new if cache is None else cache.length + new
        lean = None if cache is None or torch.is_grad_enabled() else self.lean
        by_position = self.window is not None or self._slopes is not None
        causal = causal and not by_position
        backend = self._backend(mask, new, seen, causal)
        masks = None  # the short way needs none where every token attends to every key
        if lean is None or mask is not None or by_position:
            narrow = backend is not None
            masks = self._masks(mask, positions, cache, new, seen, dtype, narrow=narrow)
        if lean is not None and cache is not None:
            states = self.base.get_input_embeddings()(tokens) if embeddings is None else embeddings
            attend = None if backend is None or masks is None else partial(backend, causal=causal)
            return lean(states, positions, masks, cache, attend, taps.see if taps else None, plan)
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "inputs_embeds": embeddings,
            "attention_mask": masks,
            "position_ids": positions,
            "past_key_values": cache,
            "use_cache": cache is not None,
        }
        if plan is not WHOLE and not plan.is_whole:
            return self._partial(plan)(embeddings if plan.first else None, **inputs)
        output = self.base(
            **inputs,
            **({"causal": True} if causal and backend is not None else {}),
            **({} if taps is None else {"output_hidden_states": True}),
        )
        if taps is not None:
            taps.see_all(output.hidden_states, self.config.num_hidden_layers)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def tapped(self, layers: Sequence[int], **inputs: Any) -> tuple[Tensor, ...]:
        """Run ``forward`` and collect the hidden states of some layers.

        Returns:
            Hidden states ``[B, T, H]`` and, unless ``layers`` is empty, ``[B, T, L, H]``.
        """
        if not layers:
            return (self(**inputs),)
        taps = Taps(layers)
        return self(**inputs, taps=taps), taps.stacked()

    def can_follow(self, plan: LayerPlan) -> bool:
        """Return whether the plan names parts that this family calls by known names."""
        try:
            self._partial(plan)
        except FalconLabError:
            return False
        return True

    def _partial(self, plan: LayerPlan) -> PartialModel:
        """Return the base model as the plan sees it, made once."""
        from falcon_lab.model.partial import PartialModel  # an ordinary round runs all layers

        if plan not in self._parts:
            self._parts[plan] = PartialModel(self.base, plan)
        return self._parts[plan]

    def _backend(self, mask: Tensor | None, new: int, seen: int, causal: bool) -> Merged | None:
        """Return what accepts a mask of the last keys in this pass; None: it needs whole masks."""
        backend = backend_of(self.implementation)
        if backend is None or mask is None or causal:
            return backend
        return backend if backend.merges(new, seen - mask.shape[-1]) else None

    def _mask_dtype(self, embeddings: Tensor | None) -> torch.dtype:
        """Return what eager attention adds; asking the model means walking its weights."""
        if self.implementation != "eager":
            return torch.bool
        dtype: torch.dtype = self.base.dtype if embeddings is None else embeddings.dtype
        return dtype

    def _masks(
        self,
        mask: Tensor | None,
        positions: Tensor,
        cache: KVCache | None,
        new: int,
        seen: int,
        dtype: torch.dtype,
        *,
        narrow: bool,
    ) -> Any:
        """Return the mask in the kernel's form; one for each kind of layer where there are several.

        ``narrow``: full attention accepts a mask of the last keys as it is.
        """
        if self.window is None and self._slopes is None and mask is None:
            return self._see_all(new, 0 if narrow else seen, dtype, positions.device)
        if mask is None:
            mask = torch.ones(1, new, 0, dtype=torch.bool, device=positions.device)
        forms = {}
        for kind in self.kinds:
            of_kind = mask if narrow and kind == FULL else widened(mask, seen)
            keys = positions
            if (kind == SLIDING or self._slopes is not None) and cache is not None:
                keys = cache.record_positions(positions)
            if kind == SLIDING:
                assert self.window is not None
                of_kind = windowed(of_kind, positions, keys, self.window)
            forms[kind] = for_attention(of_kind, self.implementation, dtype)
            if self._slopes is not None:
                forms[kind] = biased(forms[kind], self._slopes, keys)
        return forms if len(forms) > 1 else forms[self.kinds[0]]

    def _see_all(self, new: int, seen: int, dtype: torch.dtype, device: torch.device) -> Any:
        """Return a slice of one preallocated row: decoding a token builds no mask."""
        if self.implementation == "flex_attention":
            mask = torch.ones(1, new, seen, dtype=torch.bool, device=device)
            return for_attention(mask, self.implementation, dtype)
        row = self._everything
        if row is None or row.shape[-1] < seen or (row.dtype, row.device) != (dtype, device):
            with torch.inference_mode(False):
                all_true = torch.ones(1, 1, max(2 * seen, 256), dtype=torch.bool, device=device)
                row = self._everything = for_attention(all_true, self.implementation, dtype)
        return row[..., :seen].expand(-1, -1, new, -1)


@contextmanager
def of_the_kind(config: Any, what: str) -> Iterator[None]:
    """Make something fresh of a model's own kind.

    Raises:
        FalconLabError: what transformers or the fresh model itself raises, with what was made.
    """
    try:
        yield
    except FalconLabError:
        raise
    except Exception as error:  # whatever a model of an unknown kind raises
        raise FalconLabError(
            f"no {what} of the target's kind ({config.model_type}) can be made: "
            f"{one_line(error)[:300]}; choose a drafter that "
            "needs none, as lookup or medusa"
        ) from error


def plain_attention(config: Any) -> str:
    """Return the attention of a model beside the target: the target's, but no backend of ours."""
    attention = getattr(config, "_attn_implementation", None) or "sdpa"
    return "sdpa" if attention.startswith(OURS) else attention  # little is there to merge


def fresh_attention(config: Any) -> str:
    """Return the attention of fresh layers beside the target, which are to be trained.

    Families that choose the class of their modules by it know no name of ours.
    """
    from transformers import MODEL_MAPPING

    attention = plain_attention(config)
    kind = MODEL_MAPPING.get(type(config), None)
    by_name = kind is not None and kind._can_set_attn_implementation()
    return BLOCK_SPARSE if attention == "sdpa" and by_name else attention
