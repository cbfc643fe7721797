"""Count a target and a drafter whose weights nobody has made, however large they are.

Both are built as outlines, of which every weight is a shape alone, so that the numbers of a plan
are those of the modules that a training would have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig

from falcon_lab.config.schema import (
    DataConfig,
    DistillationConfig,
    Experiment,
    PretrainingConfig,
    TargetConfig,
    dtype_name,
)
from falcon_lab.data.encoding import train_tokenizer
from falcon_lab.data.feature_index import StoreIndex, kept_as
from falcon_lab.data.packing import Batch
from falcon_lab.distill.inputs import drafter_inputs, generator_for
from falcon_lab.distill.rows import label_rows
from falcon_lab.distill.stage import refuse_saved
from falcon_lab.drafters.saved import AS_TRAINED
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, is_trainable
from falcon_lab.model.loading import outlined_target
from falcon_lab.model.partial import layers_of
from falcon_lab.model.target import Target
from falcon_lab.plugins.registry import Components
from falcon_lab.pretraining.target import is_finished, source_of, target_folder
from falcon_lab.pretraining.training import build_model
from falcon_lab.studies.bench.machine import PassCost
from falcon_lab.studies.scale.arithmetic import DrafterCost, TargetCost, Work

HEAD, GROUPS = 128, 8
"""Channels of a head, and heads of keys and values, of a model that is given by its size alone."""
BYTES_VOCABULARY = 257
"""Entries of the smallest tokenizer: an outline's, which is never given a text."""
TRIED = 128
"""Tokens on which a drafter's rows are counted."""
SMALL = 32
"""Hidden size of the model on which they are."""


class Sizes(NamedTuple):
    """A target that is given by its size alone, a Llama with grouped queries.

    Attributes:
        parameters: about how many numbers it has.
        hidden: H.
        layers: L.
        vocabulary: V; embedding and LM head are two tables.
    """

    parameters: int
    hidden: int
    layers: int
    vocabulary: int

    def settings(self) -> LlamaConfig:
        """Return its configuration, whose feed-forward layers take what the others leave.

        Raises:
            FalconLabError: there is no such model.
        """
        heads = max(1, self.hidden // HEAD)
        groups = math.gcd(heads, GROUPS)
        head = self.hidden // heads
        attention = 2 * self.hidden * head * (heads + groups)
        left = self.parameters - 2 * self.vocabulary * self.hidden
        inner = round((left / self.layers - attention) / (3 * self.hidden))
        if inner < 1 or self.hidden % heads:
            raise FalconLabError(
                f"--parameters {self.parameters:,}: with --hidden {self.hidden}, --layers "
                f"{self.layers} and --vocab {self.vocabulary:,} the tables and the attention have "
                f"{self.parameters - left + self.layers * attention:,} already, or the hidden size "
                f"is no multiple of a head's {HEAD}; give the sizes of one model"
            )
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=inner,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            tie_word_embeddings=False,
            max_position_embeddings=2**17,
            dtype="bfloat16",
        )


def outline(config: TargetConfig, components: Components, sizes: Sizes | None = None) -> Target:
    """Return a target of which only the shapes are there.

    Args:
        config: names it.
        components: the registry.
        sizes: of one without a name; None: ``config`` says which.

    Raises:
        FalconLabError: it is nowhere, or is none.
    """
    tokenizer = train_tokenizer([], BYTES_VOCABULARY)
    if sizes is not None:
        return outlined_target(config, tokenizer, sizes.settings())
    source = source_of(config, components=components)
    if isinstance(source, PretrainingConfig) and is_finished(
        made := target_folder(config.name, source)
    ):
        source = str(made)
    if not isinstance(source, PretrainingConfig):
        found = outlined_target(replace(config, name=source), tokenizer)
        found.name = config.name
        return found
    own = train_tokenizer([], source.vocabulary)
    with torch.device("meta"):
        settings = build_model(source.model, own, seed=source.seed).config
    settings.vocab_size = (
        source.vocabulary
    )  # its text gives the tokenizer the entries of its recipe
    return outlined_target(config, tokenizer, settings)


def target_cost(target: Target, length: int, active: int | None = None) -> TargetCost:
    """Count a target that reads sequences of so many tokens.

    Args:
        target: an outline, or a real one.
        length: T.
        active: weights that a token is multiplied with, of a mixture of experts.

    Raises:
        FalconLabError: it is a mixture, and ``active`` is not given.
    """
    cost = PassCost.of(target, active)
    if cost is None:
        raise FalconLabError(
            f"target {target.name} is a mixture of experts, of which a token uses some weights "
            "alone; give how many with --active"
        )
    weights = list(target.model.parameters())
    head = target.model.get_output_embeddings()
    return TargetCost(
        parameters=sum(weight.numel() for weight in weights),
        bytes=sum(weight.nbytes for weight in weights),
        precision=dtype_name(target.dtype),
        largest_layer=max(map(_bytes, [*layers_of(target.backbone.base)[1], head])),
        matrices=cost.weights,
        head=head.weight.numel(),
        attended=cost.operations(length, 0) / length - 2 * cost.weights,
        cache=cost.bytes(0, length // 2) - cost.weight_bytes,
        moved=cost.weight_bytes,
    )


def _bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def outlined_drafter(node: Mapping[str, Any], target: Target, components: Components) -> Any:
    """Return the drafter of a node for an outlined target, an outline itself.

    Raises:
        FalconLabError: it cannot be built for this target.
    """
    with torch.device("meta"):
        return components.build("drafter", node, BuildContext(host=target, saved=refuse_saved))


def drafter_cost(
    drafter: Any, experiment: Experiment, target: Target, components: Components
) -> DrafterCost | None:
    """Count an outlined drafter; None where it has nothing to train.

    Raises:
        FalconLabError: its passes cannot be counted.
    """
    if not is_trainable(drafter):
        return None
    tables = {
        id(weight)
        for module in drafter.modules()
        if isinstance(module, nn.Embedding)
        for weight in module.parameters()
    }
    trained = [weight for weight in drafter.parameters() if weight.requires_grad]
    columns = target.vocab_size if drafter.vocabulary is None else drafter.vocabulary.vocab_size
    rows, own_head = _rows(experiment.drafter, target, components)
    config = experiment.distillation
    return DrafterCost(
        name=experiment.drafter["name"],
        parameters=sum(weight.numel() for weight in trained),
        bytes=_saved_bytes(drafter, config.save_dtype),
        matrices=sum(w.numel() for w in trained if w.dim() > 1 and id(w) not in tables),
        rows=rows,
        head=columns * target.hidden_size,
        own_head=own_head,
        passes=config.unroll * config.repeats,
        glances=config.repeats if _glances(experiment, config) else 0,
    )


def _saved_bytes(drafter: nn.Module, dtype: str) -> int:
    """Return the bytes of a saved drafter, all of whose numbers with a fraction may be cut."""
    whole = drafter.state_dict().values()
    size = None if dtype == AS_TRAINED else getattr(torch, dtype).itemsize
    return sum(w.numel() * ((w.is_floating_point() and size) or w.itemsize) for w in whole)


def _glances(experiment: Experiment, config: DistillationConfig) -> bool:
    return experiment.glancing["name"].rpartition("/")[2] != "none" or config.own_features > 0


def _rows(node: Mapping[str, Any], target: Target, components: Components) -> tuple[float, bool]:
    """Return a drafter's predictions a position, and whether it has an LM head of its own.

    They are counted in a pass of a small one, for a small target with as many layers.
    """
    from transformers import LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=BYTES_VOCABULARY,
        hidden_size=SMALL,
        intermediate_size=SMALL,
        num_hidden_layers=target.config.num_hidden_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2 * TRIED,
    )
    small = Target(
        LlamaForCausalLM(settings), train_tokenizer([], BYTES_VOCABULARY), name="a small target"
    )
    whole = {"draft_vocabulary": None} if "draft_vocabulary" in node else {}
    drafter = components.build("drafter", {**node, **whole}, BuildContext(host=small))
    shape = 1, TRIED
    tokens = torch.randint(BYTES_VOCABULARY, shape)
    batch = Batch(
        tokens,
        torch.ones(shape, dtype=torch.bool),
        torch.zeros(shape, dtype=torch.long),
        torch.arange(TRIED)[None],
        torch.tensor(0),
    )
    taps = torch.randn(*shape, len(drafter.taps), SMALL) if drafter.taps else None
    generators = generator_for("noise"), generator_for("drafter")
    inputs = drafter_inputs(batch, torch.randn(*shape, SMALL), 0.0, generators, taps)
    with torch.no_grad():
        found = drafter.train()(inputs)
    rows = int(label_rows(batch, found).valid.sum()) / TRIED
    return rows, found.logits is not None or found.head is not None


def store_index(config: DataConfig, target: Target, tokens: int, taps: set[int]) -> StoreIndex:
    """Return what a feature store of so many tokens would have."""
    return StoreIndex(
        target=target.fingerprint,
        data="",
        rows=math.ceil(tokens / config.length),
        length=config.length,
        hidden=target.hidden_size,
        dtype=dtype_name(target.dtype),
        shard_rows=1,
        taps=tuple(sorted(taps)),
        kept=kept_as(config.feature_store_dtype, target.dtype),
    )


def work_of(
    experiment: Experiment, target: Target, drafter: Any, tokens: int, epochs: float
) -> Work:
    """Return what is to be done with so many tokens of data."""
    data = experiment.data
    taps = tuple(drafter.taps)
    index = store_index(data, target, tokens, {*taps, *data.feature_store_taps})
    position = target.hidden_size * target.dtype.itemsize
    return Work(
        tokens=tokens,
        length=data.length,
        epochs=epochs,
        written=data.regenerate or 1.0,
        batch=data.batch_size,
        position_bytes=index.sequence_bytes / index.length,
        store_bytes=index.sequence_bytes * index.rows,
        batch_bytes=data.batch_size * data.length * position * (1 + len(taps)),
        logits_bytes=experiment.distillation.logits_mib * 2**20,
    )
