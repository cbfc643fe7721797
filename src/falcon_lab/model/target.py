"""The frozen target: a Hugging Face causal LM that trains drafters and verifies trees.

Shapes: B batch, T tokens, P prompt tokens, N tree nodes (the root counted), n new tokens,
S keys (cached ones and the new ones), L tapped layers, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from falcon_lab.config.schema import DecodingConfig
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Announce, LayerPlan, PassCompiler, Recorder
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.families import decoder_of, max_positions
from falcon_lab.model.fingerprint import fingerprint
from falcon_lab.model.kv_cache import BatchCache, KVCache
from falcon_lab.model.lm_head import HeadCopy, LMHead, NarrowHead
from falcon_lab.model.masks import (
    PaddedTrees,
    batch_step_mask,
    batch_tree_mask,
    causal_mask,
    packed_mask,
    send,
)
from falcon_lab.model.passes import (
    EagerPass,
    ForwardPass,
    NewPositions,
    PartForward,
    PassMaker,
    TokensForward,
)
from falcon_lab.tree import Entrance, TokenTree


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What a forward pass of the target gives.

    Attributes:
        logits: ``[n, V]``; after a prefill ``[1, V]``, the last position's alone.
        features: ``[n, H]``, what the LM head reads.
        taps: ``[n, L, H]`` of a target that is ``tapped``, or None.
    """

    logits: Tensor
    features: Tensor
    taps: Tensor | None = None

    def split(self, counts: Sequence[int]) -> list[TargetOutput]:
        """Split logits, features and taps into parts of ``counts`` tokens each."""
        sizes = list(counts)
        taps = [None] * len(sizes) if self.taps is None else self.taps.split(sizes)
        parts = zip(self.logits.split(sizes), self.features.split(sizes), taps, strict=True)
        return [TargetOutput(*part) for part in parts]


class Target:
    """A frozen causal LM. Not an ``nn.Module``, so that a training module that holds one neither
    trains it, saves it, nor moves it behind its back.

    Attributes:
        name: hub id, folder or built-in name.
        revision: commit on the hub, or None.
        fingerprint: identifies weights, configuration and vocabulary (see ``fingerprint.py``).
        model: the Hugging Face model.
        tokenizer: its tokenizer.
        config: its (text) configuration.
        hidden_size: H.
        vocab_size: V, of the LM head (a tokenizer may have fewer entries).
        max_positions: positions that the model was made for.
        eos_ids: tokens that end an answer.
        tuning: of a tuned target, what is known of its parent and of the tuning.
        taps: layers whose hidden states stand beside the features (``Backbone.tapped``).
    """

    taps: tuple[int, ...] = ()
    tuning: Mapping[str, Any] | None = None

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        revision: str | None = None,
        lean: bool = False,
    ) -> None:
        model.eval().requires_grad_(False)
        self.name = name
        self.revision = revision
        self.model = model
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config(decoder=True)
        self._make: PassMaker = EagerPass
        self._passes: dict[tuple[int, ...] | LayerPlan, ForwardPass] = {}
        self.backbone = Backbone(decoder_of(model), lean=lean)
        self.hidden_size: int = self.config.hidden_size
        head = model.get_output_embeddings()
        if head is None:
            raise FalconLabError(f"target {name} ({type(model).__name__}) has no LM head")
        self._lm_head = LMHead(head, self.config)
        self._embedding = model.get_input_embeddings()
        self.vocab_size: int = head.weight.shape[0]
        self.max_positions = max_positions(self.config)
        self.eos_ids = end_tokens(model, tokenizer)
        self.fingerprint = fingerprint(model, tokenizer)
        self._positions = torch.empty(1, 0, dtype=torch.long)  # [1, 0..] = 0, 1, 2, …

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return self._embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Return where the model is."""
        return self._embedding.weight.device  # the model's own property walks all its weights

    def to(self, device: torch.device | str) -> Self:
        """Move the model; caches made before stay where they are."""
        self.model.to(device)
        return self

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens: ``[...]`` long -> ``[..., H]``."""
        return self._embedding(tokens)

    def head(self, features: Tensor) -> Tensor:
        """Return the model's own logits of features: ``[..., H]`` -> ``[..., V]``."""
        return self._lm_head.forward(features)

    def norm(self, states: Tensor) -> Tensor:
        """Return features of hidden states between the layers: ``[..., H]``.

        Raises:
            FalconLabError: the model has no final norm of a name that is known.
        """
        features: Tensor = self.backbone.final_norm(states)
        return features

    def pass_cost(self, plan: LayerPlan) -> float:
        """Return what a pass through a part of the layers and the LM head costs, in decode steps.

        Counted are the weights that it multiplies by.

        Raises:
            FalconLabError: there are no such layers, or no part of this model can be run.
        """
        from falcon_lab.model.partial import weights_of

        head = sum(weight.numel() for weight in self._lm_head.linear.parameters())
        part, whole = (weights_of(self.backbone.base, each) for each in (plan, LayerPlan()))
        return (part + head) / (whole + head)

    def narrow_head(self, tokens: Tensor) -> NarrowHead:
        """Return the LM head's rows of some tokens, ``[n]`` long: ``[..., H]`` -> ``[..., n]``.

        Raises:
            FalconLabError: the LM head is quantised, adapted or hooked.
        """
        return NarrowHead(self._lm_head.linear, self.config, tokens)

    def copy_head(self, tokens: Tensor | None = None) -> HeadCopy:
        """Return a head that begins as the model's own, and can be trained.

        Args:
            tokens: ``[n]`` long, whose rows it has; None: all.

        Raises:
            FalconLabError: as ``narrow_head``, where some rows are asked for.
        """
        return HeadCopy(self._lm_head.linear, self.config, tokens)

    def run_upper(self, layer: int, states: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run the layers from one on, without a KV cache; gradients go through them to ``states``.

        Args:
            layer: the first that is run, counted from 0.
            states: ``[B, T, H]``, what it reads.
            positions: ``[B, T]`` long.
            mask: ``[B, T, T]`` bool, which of these positions each one attends to.

        Returns:
            Features ``[B, T, H]``.
        """
        plan = LayerPlan(first=layer)
        plan.check(self.config.num_hidden_layers)
        found: Tensor = self.backbone(embeddings=states, positions=positions, mask=mask, plan=plan)
        return found

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache for one sequence of up to ``capacity`` positions, with its tree.

        With CUDA graphs it reuses the memory of the one before, which becomes invalid.
        """
        return self._pass.new_cache(capacity)

    def kv_bytes(self, capacity: int) -> int:
        """Return the bytes of a cache of that capacity, exactly."""
        return self._pass.cache_bytes(capacity)

    @property
    def kv_allocated(self) -> int:
        """Return the bytes that are allocated already, and that the next cache reuses."""
        return self._pass.reserved_bytes

    @torch.no_grad()
    def teacher(self, tokens: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        """Return the features of packed documents, each as if it stood alone.

        Args:
            tokens: ``[B, T]`` long.
            documents: ``[B, T]`` long, document of each token; padding is -1.
            positions: ``[B, T]`` long, position in the document.

        Returns:
            ``[B, T, H]``, without gradient.
        """
        return self._teach(tokens, documents, positions)[0]

    @torch.no_grad()
    def tapped_teacher(
        self, tokens: Tensor, documents: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return features as ``teacher`` does, and what the same pass taps, ``[B, T, L, H]``."""
        features, taps = self._teach(tokens, documents, positions)
        return features, taps

    def _teach(self, tokens: Tensor, documents: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        mask = packed_mask(documents)
        return self._run(tokens=tokens, positions=positions, mask=mask)

    def _run(self, **inputs: Any) -> tuple[Tensor, ...]:
        """Return features ``[B, T, H]`` and, of a target that is tapped, ``[B, T, L, H]``."""
        return self.backbone.tapped(self.taps, **inputs)

    def prefill(
        self, tokens: Tensor, cache: KVCache, *, chunk: int = DecodingConfig.prefill_chunk
    ) -> TargetOutput:
        """Read ``[P]`` tokens as ``read`` does: features of all, logits of the last."""
        parts = list(self.read(tokens, cache, chunk=chunk))
        if len(parts) == 1:
            return parts[0]
        taps = [part.taps for part in parts if part.taps is not None]
        return TargetOutput(
            parts[-1].logits,
            torch.cat([part.features for part in parts]),
            torch.cat(taps) if taps else None,
        )

    @torch.no_grad()
    def read(
        self, tokens: Tensor, cache: KVCache, *, chunk: int = DecodingConfig.prefill_chunk
    ) -> Iterator[TargetOutput]:
        """Read ``[P]`` tokens in passes of ``chunk``, the last of what is left.

        No mask is larger than ``[1, chunk, S]``, and no features are kept here.

        Yields:
            Of each pass, in their order: features of its tokens, logits of its last one.
        """
        self._range(cache.length, tokens.shape[0])  # all of them fit, or none is read
        for part in tokens.split(chunk):
            start, new = cache.length, part.shape[0]
            hidden, *taps = self._run(
                tokens=part[None],
                positions=self._range(start, new),
                mask=causal_mask(new, 0, tokens.device) if new > 1 else None,
                cache=cache,
                causal=new > 1,
            )
            yield TargetOutput(
                self.head(hidden[0, -1:]), hidden[0], *(states[0] for states in taps)
            )

    def tapped(self, layers: Sequence[int]) -> Self:
        """Return the same model where it is, whose outputs carry hidden states of some layers too.

        Args:
            layers: 0 is what the first decoder layer reads, i what layer i puts out, counted from
                1; the last one's output are the features.

        Raises:
            FalconLabError: there is no such layer.
        """
        if tuple(layers) == self.taps:
            return self
        other = copy.copy(self)
        other.taps = checked_layers(layers, self.config.num_hidden_layers)
        return other

    def compiled(
        self,
        announce: Announce,
        compiler: PassCompiler | None = None,
        recorder: Recorder | None = None,
    ) -> Self:
        """Return the same model where it is, whose steps and verifications are compiled.

        On a GPU they are CUDA graphs, and one sequence is decoded at a time.

        Args:
            announce: is called with one line for the user at a time.
            compiler: compiles the passes on a CPU; None: inductor, ahead of time.
            recorder: captures graphs; None: on a GPU alone.
        """
        from falcon_lab.model.fast_passes import fast_passes  # an eager target stands without

        return self.with_passes(fast_passes(self.device, announce, compiler, recorder))

    def plain(self) -> Self:
        """Return the same model without compiled passes."""
        return self.with_passes(EagerPass)

    def with_passes(self, make: PassMaker) -> Self:
        """Return the same model where it is, whose steps and verifications are run by ``make``."""
        other = copy.copy(self)
        other._make, other._passes = make, {}
        return other

    @property
    def is_compiled(self) -> bool:
        """Return whether steps and verifications are compiled."""
        return not self._pass.is_eager

    def prepare(self, most: int) -> None:
        """Compile the passes over up to so many nodes now, if they are to be compiled at all."""
        self._pass.prepare(most)

    @property
    def _pass(self) -> ForwardPass:
        """Return what runs steps and verifications; one for all copies with the same taps."""
        made = self._passes.get(self.taps)
        if made is None:
            forward = TokensForward(self.backbone, self._lm_head, "target", self.taps)
            made = self._passes[self.taps] = self._make(forward)
        return made

    def _part(self, plan: LayerPlan) -> ForwardPass:
        """Return what runs passes through a part of the layers."""
        made = self._passes.get(plan)
        if made is None:
            plan.check(self.config.num_hidden_layers)
            name = "verify" if plan.first else "draft"
            make = self._make if plan.gate is None else EagerPass  # which waits for every gate
            made = self._passes[plan] = make(PartForward(self.backbone, plan, name))
        return made

    @property
    def backbone(self) -> Backbone:
        """Return the model without its LM head."""
        return self._backbone

    @backbone.setter
    def backbone(self, backbone: Backbone) -> None:
        self._backbone, self._passes = backbone, {}

    @torch.no_grad()
    def step(self, token: Tensor, cache: KVCache) -> TargetOutput:
        """Read one token (0-d long)."""
        return self._forward(token.view(1), self._range(cache.length, 1)[0], None, cache)

    @torch.no_grad()
    def verify(self, tree: TokenTree, cache: KVCache) -> TargetOutput:
        """Read a tree; output i is that of node i after its path.

        All N nodes are in the cache afterwards, provisionally: ``cache.commit([start], [path])``
        with the length before retains a path of them.
        """
        start, nodes = cache.length, tree.nodes
        if nodes == 1:
            return self.step(tree.tokens[0], cache)
        if start + nodes > self.max_positions:  # only near the end does the depth matter
            self._range(start, tree.reach + 1)
        if tree.entrance is not None:
            return self._verify_entering(tree, tree.entrance, cache)
        return self._forward(tree.tokens, tree.depth + start, tree.ancestors, cache)

    def _verify_entering(self, tree: TokenTree, entrance: Entrance, cache: KVCache) -> TargetOutput:
        """Read a tree through the lower layers, and with its auxiliary nodes through the others."""
        start, drafts = cache.length, tree.drafts
        lower = NewPositions(drafts.depth + start, drafts.ancestors, cache)
        states = self.run_part(drafts.tokens, lower, LayerPlan(last=entrance.layer))
        cache.truncate(start)  # for the upper layers' positions
        states = torch.cat((states, entrance.states(states)))
        return self.verify_from(entrance.layer, states, tree, cache)

    @torch.no_grad()
    def verify_from(
        self, layer: int, states: Tensor, tree: TokenTree, cache: KVCache
    ) -> TargetOutput:
        """Read a tree from a layer on, as ``verify`` does.

        Args:
            layer: the first that is run, counted from 0.
            states: ``[N, H]``, what it reads of every node.
            tree: the nodes; keys and values of the layers below are in the cache already, behind
                its length, where these are ever attended to.
            cache: of the sequence.

        Raises:
            FalconLabError: the target is tapped below that layer, or more than once.
        """
        where = NewPositions(tree.depth + cache.length, tree.ancestors, cache)
        hidden = self.run_part(states, where, LayerPlan(first=layer))
        return TargetOutput(self.head(hidden), hidden, self._taps_of(layer, states))

    def _taps_of(self, layer: int, states: Tensor) -> Tensor | None:
        """Return the taps of a pass that begins with states of a layer."""
        if self.taps not in ((), (layer,)):
            raise FalconLabError(
                f"layers {list(self.taps)} are tapped, and verification in parts gives the states "
                f"that layer {layer} reads alone; choose drafters that tap nothing else"
            )
        return states[..., None, :] if self.taps else None

    def _forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> TargetOutput:
        hidden, logits, *taps = self._pass([tokens], NewPositions(positions, mask, cache))
        return TargetOutput(logits, hidden, *taps)

    @torch.no_grad()
    def run_part(self, inputs: Tensor, new: NewPositions, plan: LayerPlan) -> Tensor:
        """Append tokens to a sequence, through a part of the layers.

        Args:
            inputs: ``[n]`` long, tokens, or ``[n, H]``, what the first layer of the plan reads.
            new: where they stand, and the sequence's cache.
            plan: the part.

        Returns:
            ``[n, H]`` where the plan ends.

        Raises:
            FalconLabError: there are no such layers, or no part of this model can be run.
        """
        return self._part(plan)([inputs], new)[0]

    # --- several sequences at once ----------------------------------------------------------

    def new_batch_cache(self, sequences: int, capacity: int) -> BatchCache:
        """Return an empty cache of B sequences of up to ``capacity`` positions each.

        ``cache.open`` gives one sequence's part of it, which is prefilled like any other cache;
        ``step_batch`` and ``verify_batch`` continue the sequences in use.
        """
        return self.backbone.new_batch_cache(sequences, capacity)

    def batch_bytes(self, sequences: int, capacity: int) -> int:
        """Return the memory of such a cache in bytes, exactly."""
        return self.backbone.layout.bytes(capacity, sequences)

    @torch.no_grad()
    def step_batch(self, tokens: Tensor, cache: BatchCache) -> TargetOutput:
        """Read the next token of every sequence in use, ``[B]`` long; output b is token b's.

        The tokens stay in the cache when they are committed.
        """
        starts = cache.lengths
        self._range(max(starts), 1)
        cache.begin()
        hidden, *taps = self._run(
            tokens=tokens[:, None],
            positions=send(starts, tokens.device)[:, None],
            mask=batch_step_mask(starts, tokens.device),
            cache=cache,
        )
        features = hidden[:, 0]
        return TargetOutput(self.head(features), features, *(states[:, 0] for states in taps))

    @torch.no_grad()
    def verify_batch(self, trees: Sequence[TokenTree], cache: BatchCache) -> TargetOutput:
        """Read a tree of every sequence in use, in one pass.

        Returns:
            Node after node, tree after tree: ``[Σn, V]`` logits, ``[Σn, H]`` features, and
            ``[Σn, L, H]`` where it is tapped.
        """
        starts = cache.lengths
        if all(tree.nodes == 1 for tree in trees):
            return self.step_batch(torch.cat([tree.tokens for tree in trees]), cache)
        padded = PaddedTrees.of(trees)
        if max(starts) + padded.width > self.max_positions:
            for start, tree in zip(starts, trees, strict=True):
                self._range(start, tree.reach + 1)
        entrances = [tree.entrance for tree in trees if tree.entrance is not None]
        if entrances:
            return self._verify_batch_entering(trees, entrances[0].layer, cache)
        cache.begin()
        hidden, *taps = self._run(
            tokens=padded.tokens,
            positions=padded.depth + send(starts, padded.depth.device)[:, None],
            mask=batch_tree_mask(padded.ancestors, starts),
            cache=cache,
        )
        features = padded.real(hidden)
        return TargetOutput(self.head(features), features, *map(padded.real, taps))

    def _verify_batch_entering(
        self, trees: Sequence[TokenTree], layer: int, cache: BatchCache
    ) -> TargetOutput:
        """Read trees through the lower layers, and with auxiliary nodes through the others."""
        drafts = [tree.drafts for tree in trees]
        lower = PaddedTrees.of(drafts)
        below = lower.real(self._part_of_trees(lower.tokens, lower, cache, LayerPlan(last=layer)))
        states = [
            of_one if tree.entrance is None else torch.cat((of_one, tree.entrance.states(of_one)))
            for tree, of_one in zip(trees, below.split(lower.counts), strict=True)
        ]
        return self.verify_batch_from(layer, states, trees, cache)

    @torch.no_grad()
    def verify_batch_from(
        self, layer: int, states: Sequence[Tensor], trees: Sequence[TokenTree], cache: BatchCache
    ) -> TargetOutput:
        """Read a tree of every sequence in use from a layer on, as ``verify_batch`` does.

        The arguments are those of ``verify_from``, states and a tree for every sequence.

        Raises:
            FalconLabError: as ``verify_from``.
        """
        padded, given = PaddedTrees.of(trees), pad_sequence(list(states), batch_first=True)
        features = padded.real(self._part_of_trees(given, padded, cache, LayerPlan(first=layer)))
        taps = self._taps_of(layer, torch.cat(list(states)))
        return TargetOutput(self.head(features), features, taps)

    def _part_of_trees(
        self, inputs: Tensor, padded: PaddedTrees, cache: BatchCache, plan: LayerPlan
    ) -> Tensor:
        """Read padded trees, ``[B, N]`` or ``[B, N, H]``, through a part of the layers."""
        starts = cache.lengths
        cache.begin()
        positions = padded.depth + send(starts, padded.depth.device)[:, None]
        mask = batch_tree_mask(padded.ancestors, starts)
        return self.run_part_batch(inputs, positions, mask, cache, plan)

    @torch.no_grad()
    def run_part_batch(
        self,
        inputs: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: BatchCache,
        plan: LayerPlan,
    ) -> Tensor:
        """Append n tokens to each of R sequences, for which the cache has begun a pass.

        Args:
            inputs: ``[R, n]`` long, tokens, or ``[R, n, H]``, what the plan's first layer reads.
            positions: ``[R, n]`` long.
            mask: ``[R, n, W]`` bool over the last W keys of the longest sequence.
            cache: of the sequences.
            plan: the part.

        Returns:
            ``[R, n, H]`` where the plan ends.
        """
        plan.check(self.config.num_hidden_layers)
        given = {"embeddings" if plan.first else "tokens": inputs}
        found: Tensor = self.backbone(
            positions=positions, mask=mask, cache=cache, plan=plan, **given
        )
        return found

    def _range(self, start: int, new: int) -> Tensor:
        """Return positions start, start + 1, …: a slice of a tensor that is made once."""
        stop = start + new
        if stop > self.max_positions:
            raise FalconLabError(
                f"position {stop - 1} is beyond {self.name}'s {self.max_positions} positions; "
                "shorten the prompt or ask for fewer new tokens"
            )
        if self._positions.shape[1] < stop or self._positions.device != self.device:
            size = min(max(2 * stop, 256), self.max_positions)
            with torch.inference_mode(False):
                self._positions = torch.arange(size, device=self.device)[None]
        return self._positions[:, start:stop]


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return all tokens that the generation settings, the model or the tokenizer call an end.

    Raises:
        FalconLabError: one is no number.
    """
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        listed = ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]
        if wrong := [one for one in listed if type(one) is not int]:
            raise FalconLabError(
                f"eos_token_id is {wrong[0]!r:.60} in the {type(source).__name__} of the target; "
                "it must be a number or a list of numbers: mend its JSON file"
            )
        found.update(listed)
    return frozenset(found)


def checked_layers(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """Check the layers to tap of a target with ``count`` layers, and return them.

    Raises:
        FalconLabError: one cannot, or is there twice.
    """
    if len(set(layers)) < len(layers):
        raise FalconLabError(f"the drafter taps a layer twice: {list(layers)}")
    if wrong := [layer for layer in layers if not 0 <= layer < count]:
        raise FalconLabError(
            f"the drafter taps layer {wrong[0]}, and the target has the layers 0 (embeddings) to "
            f"{count - 1}; what its last layer puts out are its features"
        )
    return tuple(layers)
