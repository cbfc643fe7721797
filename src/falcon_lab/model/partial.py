"""A Hugging Face base model seen as if it had a part of its layers only.

Nothing is copied or patched: a partial model is made of the base model's own modules, in other
lists. A skipped attention or feed-forward network is a module that gives zeros, and the residual
connection around it adds them.

Shapes: B batch, T tokens, H hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import LayerPlan, MlpGate
from falcon_lab.model.gating import gated

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "layer_norm")
"""What families call the norm before the LM head."""

ATTENTIONS = ("self_attn", "attn", "attention", "self_attention")
"""What families call a layer's attention."""

NETWORKS = ("mlp", "feed_forward", "ffn")
"""What families call a layer's feed-forward network."""

MLP_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2")
"""What families call the norm before it, whose input is the residual stream."""

ATTENTION_NORMS = ("input_layernorm", "ln_1")
"""What families call the norm before a layer's attention; some have none."""

NORM_BEHIND = "post_feedforward_layernorm"
"""What families call a norm of what it puts out, before that is added."""


def final_norm_of(base: Any) -> tuple[str, nn.Module]:
    """Return the module that makes the features of the last layer's hidden states, with its name.

    Raises:
        FalconLabError: it has none of the names that are known.
    """
    return _child(base, FINAL_NORMS, "the final norm")


def layers_of(base: Any) -> tuple[str, nn.ModuleList]:
    """Return the decoder layers, with the name of their list.

    Raises:
        FalconLabError: they are in no list of the base model's own.
    """
    count = base.config.num_hidden_layers
    for name, child in base.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return name, child
    raise FalconLabError(
        f"the layers of {type(base).__name__} are in no list of its own, so that no pass can go "
        "through a part of them; choose a target of another family"
    )


def weights_of(base: Any, plan: LayerPlan) -> int:
    """Count the weights that a pass under a plan multiplies by, in the layers that it runs.

    Raises:
        FalconLabError: the model has not such layers, or parts of them by names that are not known.
    """
    layers = layers_of(base)[1]
    runs = plan.runs(len(layers))
    parts = [_without(layers[layer], layer, plan) for layer in runs]
    return sum(weight.numel() for part in parts for weight in part.parameters())


class PartialModel:
    """A base model through which passes take a part of the way.

    Args:
        base: a Hugging Face base model.
        plan: which part.

    Raises:
        FalconLabError: the model has not such layers, or parts of them by names that are not known.
    """

    def __init__(self, base: Any, plan: LayerPlan) -> None:
        name, layers = layers_of(base)
        plan.check(len(layers))
        runs = plan.runs(len(layers))
        if plan.beside is not None:
            raise FalconLabError(
                f"the attentions of a group of layers of {type(base).__name__} cannot run on "
                "several devices: only those of Llama-like layers can (target.lean=true)"
            )
        self._gate = plan.gate
        parts = [_without(layers[layer], layer, plan) for layer in runs]
        for group in plan.groups:
            _group(parts, [runs.index(layer) for layer in group if layer in runs])
        self._entrance = _Entrance() if plan.first else None
        if self._entrance is not None:
            parts[0] = self._entrance.before(parts[0])
        changed: dict[str, Any] = {name: nn.ModuleList(parts)}
        if plan.last is not None:
            changed[final_norm_of(base)[0]] = nn.Identity()
        self._base = _with(base, changed)
        self._base.config = _shortened(base.config, runs)

    def __call__(self, states: Tensor | None, **inputs: Any) -> Tensor:
        """Run the part.

        Args:
            states: ``[B, T, H]``, what the first layer of the plan reads, where that is not the
                model's first layer.
            inputs: of the base model's ``forward``.

        Returns:
            ``[B, T, H]`` where the plan ends.
        """
        if self._entrance is not None:
            self._entrance.states = states
        if self._gate is not None:
            given = next(
                one
                for one in (states, inputs["input_ids"], inputs["inputs_embeds"])
                if one is not None
            )
            self._gate.begin(inputs["position_ids"].expand(given.shape[:2]).flatten())
        hidden: Tensor = self._base(**inputs).last_hidden_state
        return hidden


class _Entrance:
    """Gives the first layer of a partial model other hidden states than its embeddings."""

    states: Tensor | None = None

    def before(self, layer: nn.Module) -> nn.Module:
        """Return the layer, which reads ``states`` whatever it is called with."""
        entered = _with(layer, {})
        forward = entered.forward

        def enter(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return forward(hidden_states if self.states is None else self.states, *args, **kwargs)

        entered.forward = enter
        return entered


class _Group:
    """Gives the attentions of a group of layers what its first layer reads."""

    states: Tensor

    def begin(self, layer: nn.Module) -> nn.Module:
        """Return the first layer, which notes what it reads."""
        noted = _with(layer, {})
        forward = noted.forward

        def note(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.states = hidden_states
            return forward(hidden_states, *args, **kwargs)

        noted.forward = note
        return noted


class _GroupAttention(nn.Module):
    """An attention that reads what its group reads, whatever it is called with.

    Args:
        inner: the attention.
        norm: of its own layer, before it; None: there is none.
        group: knows what the group reads.
    """

    def __init__(self, inner: nn.Module, norm: nn.Module | None, group: _Group) -> None:
        super().__init__()
        self.inner, self.norm = inner, norm
        self._group = group

    def _given(self) -> Tensor:
        states = self._group.states
        return states if self.norm is None else self.norm(states)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(self._given(), *args, **kwargs)


class _FirstAttention(_GroupAttention):
    """The first attention of a group, by which it is seen in one pass that others read right."""

    _checked = False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (self._checked or torch.compiler.is_compiling()):
            if not torch.equal(self._given(), hidden_states):
                raise FalconLabError(
                    f"{type(self.inner).__name__} reads something else than what its layer reads, "
                    f"behind a norm called {' or '.join(ATTENTION_NORMS)} if there is one, so that "
                    "no attentions run side by side; choose a target of another family"
                )
            self._checked = True
        return self.inner(hidden_states, *args, **kwargs)


class _NoAttention(nn.Module):
    """Attends to nothing: zeros, and no attention weights."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _Stream(nn.Module):
    """The norm before a feed-forward network, which keeps what it is given."""

    hidden: Tensor

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: Tensor) -> Tensor:
        self.hidden = hidden
        found: Tensor = self.norm(hidden)
        return found


class _GatedNetwork(nn.Module):
    """A feed-forward network that tokens go through where a gate has them do so.

    Args:
        inner: the network.
        behind: a norm of what it puts out, or None.
        stream: keeps what enters the norm before it; None: there is none.
        gate: decides.
        layer: whose network it is.
    """

    def __init__(
        self,
        inner: nn.Module,
        behind: nn.Module | None,
        stream: _Stream | None,
        gate: MlpGate,
        layer: int,
    ) -> None:
        super().__init__()
        self.inner, self.behind, self.stream = inner, behind, stream
        self._gate, self._layer = gate, layer

    def forward(self, normed: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows = normed.flatten(0, -2)

        def network(chosen: Tensor | None) -> Tensor:
            given = rows if chosen is None else rows[chosen]
            found: Tensor = self.inner(given[None], *args, **kwargs)
            return (found if self.behind is None else self.behind(found))[0]

        hidden = normed if self.stream is None else self.stream.hidden
        added = gated(self._gate, self._layer, hidden.flatten(0, -2), network)
        return added.view_as(normed)


class _NoNetwork(nn.Module):
    """A feed-forward network that adds nothing."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros_like(hidden_states)


def _without(layer: nn.Module, number: int, plan: LayerPlan) -> nn.Module:
    """Return a layer without what the plan skips of it."""
    changed: dict[str, Any] = {}
    if number in plan.skip_attention:
        changed[_child(layer, ATTENTIONS, "the attention")[0]] = _NoAttention()
    if number in plan.skip_mlp:
        changed[_child(layer, NETWORKS, "the feed-forward network")[0]] = _NoNetwork()
    elif plan.gate is not None:
        changed |= _gated(layer, number, plan.gate)
    return _with(layer, changed) if changed else layer


def _group(parts: list[nn.Module], places: Sequence[int]) -> None:
    """Have the attentions of a group of layers read what the first of them reads."""
    group = _Group()
    for number, place in enumerate(places):
        layer, made = parts[place], _GroupAttention if number else _FirstAttention
        name, inner = _child(layer, ATTENTIONS, "the attention")
        norms = [getattr(layer, norm) for norm in ATTENTION_NORMS if hasattr(layer, norm)]
        parts[place] = _with(layer, {name: made(inner, next(iter(norms), None), group)})
    if places:
        parts[places[0]] = group.begin(parts[places[0]])


def _gated(layer: nn.Module, number: int, gate: MlpGate) -> dict[str, Any]:
    """Return a layer's network and the norms around it, gated."""
    changed: dict[str, Any] = {}
    name, inner = _child(layer, NETWORKS, "the feed-forward network")
    behind = getattr(layer, NORM_BEHIND, None)
    if behind is not None:
        changed[NORM_BEHIND] = nn.Identity()  # a part of the network: zeros stay zeros
    stream = None
    if behind is None or hasattr(layer, MLP_NORMS[0]):
        norm, before = _child(layer, MLP_NORMS, "the norm before the feed-forward network")
        changed[norm] = stream = _Stream(before)
    changed[name] = _GatedNetwork(inner, behind, stream, gate, number)
    return changed


def _child(module: nn.Module, names: tuple[str, ...], what: str) -> tuple[str, nn.Module]:
    for name in names:
        found = getattr(module, name, None)
        if isinstance(found, nn.Module):
            return name, found
    raise FalconLabError(f"{what} of {type(module).__name__} is none of {', '.join(names)}")


def _with(module: Any, children: dict[str, Any]) -> Any:
    """Return a module of the same parameters and children, but for some children."""
    view = copy.copy(module)
    view._modules = {**module._modules, **children}
    return view


def _shortened(config: Any, layers: tuple[int, ...]) -> Any:
    """Return a configuration of these layers alone."""
    shortened = copy.copy(config)
    shortened.num_hidden_layers = len(layers)
    if kinds := getattr(config, "layer_types", None):
        shortened.layer_types = [kinds[layer] for layer in layers]
    return shortened
