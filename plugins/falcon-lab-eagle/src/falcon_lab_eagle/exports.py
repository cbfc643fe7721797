"""EAGLE's heads as vLLM, SGLang, speculators and OpenVINO read them.

Layer ids: our tap i is what layer i puts out, counted from 1 (0: the embeddings). vLLM and
speculators number as we do; SGLang adds one to what it is given, and OpenVINO counts layers from 0.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.export.mapping import (
    IDS,
    dtype_of,
    ids_of,
    plain_tables,
    renamed,
    reversed_names,
    sglang_command,
    token_ids,
    vllm_command,
    vocabulary_maps,
    without,
)
from falcon_lab.interfaces import Exported, ExportFormat, TrainedDrafter
from falcon_lab_eagle.eagle3 import default_taps, layer_config

TAPS = 3
"""Layers that engines read for EAGLE-3."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def eagle3_names(layer: str) -> dict[str, str]:
    """Return our names of EAGLE-3's weights and the engines', whose decoder layer is ``layer``."""
    ours = "backbone.base"
    return {
        "mix.weight": "fc.weight",
        "norm.weight": "norm.weight",
        f"{ours}.embedding_norm.weight": f"{layer}.input_layernorm.weight",
        f"{ours}.hidden_norm.weight": f"{layer}.hidden_norm.weight",
        f"{ours}.mlp_norm.weight": f"{layer}.post_attention_layernorm.weight",
        **{f"{ours}.attention.{n}.weight": f"{layer}.self_attn.{n}.weight" for n in PROJECTIONS},
        **{f"{ours}.mlp.{n}.weight": f"{layer}.mlp.{n}.weight" for n in FEED_FORWARD},
    }


class Eagle3Format(ExportFormat):
    """What the engines' formats of EAGLE-3 share.

    Attributes:
        layer: what they call the decoder layer.
        has_tables: whether the target's embeddings and LM head come along in any case.
    """

    layer = "midlayer"
    has_tables = False

    def write(self, drafter: TrainedDrafter) -> Exported:
        """Map names and configuration; rows of the target's LM head come along where needed."""
        taps = self.checked_taps(drafter)
        ours = dict(drafter.tensors)
        ids, head = ours.pop(IDS, None), ours.pop("head.weight", None)
        tensors = renamed(ours, eagle3_names(self.layer))
        tables = plain_tables(drafter.host)
        if head is None and ids is not None:
            head = tables.head[ids]
        if head is not None:
            tensors["lm_head.weight"] = head
        if ids is not None:
            tensors |= vocabulary_maps(ids, drafter.host.vocab_size)
        config = self.config(drafter, taps, tensors)
        if self.has_tables:
            given = {"embed_tokens.weight": tables.embeddings, "lm_head.weight": tables.head}
            tensors = given | tensors
        return Exported(config, tensors)

    def checked_taps(self, drafter: TrainedDrafter) -> list[int]:
        """Return the layers that are read, as the format numbers them.

        Raises:
            FalconLabError: the format cannot say them.
        """
        named = drafter.config.taps
        taps = list(default_taps(drafter.host.config.num_hidden_layers) if named is None else named)
        if len(taps) != TAPS:
            raise FalconLabError(
                f"the drafter reads the layers {taps}, and {self.engines} reads {TAPS} of them; "
                f"train one with drafter.taps=[…] of {TAPS} layers"
            )
        if sorted(taps) != taps:
            raise FalconLabError(
                f"the drafter reads the layers {taps}, and {self.engines} gives them in ascending "
                "order; train one with ascending drafter.taps"
            )
        return taps

    def config(
        self, drafter: TrainedDrafter, taps: list[int], tensors: dict[str, Tensor]
    ) -> dict[str, Any]:
        """Return ``config.json``."""
        has_ids = "d2t" in tensors
        drafted = len(tensors["d2t"]) if has_ids else drafter.host.vocab_size
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **llama_layer(drafter),
            "dtype": dtype_of(tensors),
            "torch_dtype": dtype_of(tensors),
            "draft_vocab_size": drafted,
            "tie_word_embeddings": False,
            "norm_before_residual": drafter.config.norm_before_residual,
            "target_hidden_size": drafter.host.hidden_size,
        }

    def read(self, exported: Exported, drafter: TrainedDrafter) -> dict[str, Tensor]:
        """Map the names back; what comes from the target is left out."""
        tensors = dict(exported.tensors)
        offsets, head = tensors.pop("d2t", None), tensors.pop("lm_head.weight", None)
        tensors = without(tensors, "t2d", "embed_tokens.weight")
        ours = renamed(tensors, reversed_names(eagle3_names(self.layer)))
        if drafter.config.head == "own":
            if head is None:
                raise FalconLabError("among its tensors lm_head.weight is missing")
            ours["head.weight"] = head
        if offsets is not None and drafter.config.draft_vocabulary is not None:
            ours[IDS] = ids_of(offsets)
        return ours


def llama_layer(drafter: TrainedDrafter) -> dict[str, Any]:
    """Return the decoder layer of EAGLE-3 as the configuration of a Llama of one layer."""
    host, made = drafter.host, layer_config(drafter.host, drafter.config)
    theta = made.rope_parameters["rope_theta"]
    return {
        "model_type": "llama",
        "vocab_size": host.vocab_size,
        "hidden_size": host.hidden_size,
        "intermediate_size": made.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": made.num_attention_heads,
        "num_key_value_heads": made.num_key_value_heads,
        "head_dim": made.head_dim,
        "hidden_act": made.hidden_act,
        "rms_norm_eps": made.rms_norm_eps,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": host.max_positions,
        "attention_bias": False,
        "mlp_bias": False,
        **token_ids(host.config),
    }


class Eagle3Vllm(Eagle3Format):
    """EAGLE-3 for vLLM's ``LlamaForCausalLMEagle3``."""

    engines = "vLLM (0.32 and 0.33)"
    tags = ("eagle3", "vllm")

    def config(
        self, drafter: TrainedDrafter, taps: list[int], tensors: dict[str, Tensor]
    ) -> dict[str, Any]:
        """Return ``config.json``, in which layer i is our tap i."""
        return {
            **super().config(drafter, taps, tensors),
            "eagle_aux_hidden_state_layer_ids": taps,
        }

    def serving(self, folder: str, drafter: TrainedDrafter) -> str:
        """Return the command line."""
        return vllm_command(folder, drafter.place, "eagle3", drafter.draft_tokens)


class CountedFromZero(Eagle3Format):
    """EAGLE-3 for programs in which layer i - 1 is our tap i."""

    def checked_taps(self, drafter: TrainedDrafter) -> list[int]:
        """Return the taps less one."""
        taps = super().checked_taps(drafter)
        if taps[0] == 0:
            raise FalconLabError(
                f"the drafter reads the layers {taps}, and {self.engines} cannot be told of the "
                "embeddings (0); train one with drafter.taps from 1 on"
            )
        return [tap - 1 for tap in taps]


class Eagle3Sglang(CountedFromZero):
    """EAGLE-3 for SGLang's ``LlamaForCausalLMEagle3``."""

    engines = "SGLang (0.5.23)"
    tags = ("eagle3", "sglang")

    def config(
        self, drafter: TrainedDrafter, taps: list[int], tensors: dict[str, Tensor]
    ) -> dict[str, Any]:
        """Return ``config.json``; without an LM head of its own the target's is taken for null."""
        found = super().config(drafter, taps, tensors)
        if "lm_head.weight" not in tensors:
            found["draft_vocab_size"] = None
        return {
            **found,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": taps,
                "use_aux_hidden_state": True,
            },
        }

    def serving(self, folder: str, drafter: TrainedDrafter) -> str:
        """Return the command line; SGLang counts the root among the draft tokens."""
        return sglang_command(folder, drafter.place, "EAGLE3", drafter.draft_tokens)


class Eagle3Speculators(Eagle3Format):
    """EAGLE-3 for ``Eagle3DraftModel`` of speculators, whose folder vLLM serves by itself."""

    engines = "speculators (0.9) and vLLM"
    tags = ("eagle3", "vllm", "speculators")
    layer = "layers.0"
    has_tables = True

    def config(
        self, drafter: TrainedDrafter, taps: list[int], tensors: dict[str, Tensor]
    ) -> dict[str, Any]:
        """Return ``config.json``, in which layer i is our tap i."""
        of_engines = super().config(drafter, taps, tensors)
        config = drafter.host.model.config
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "draft_vocab_size": of_engines["draft_vocab_size"],
            "norm_before_residual": drafter.config.norm_before_residual,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": taps,
            "tie_word_embeddings": False,
            "dtype": of_engines["dtype"],
            "transformer_layer_config": llama_layer(drafter),
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": drafter.draft_tokens,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {
                    "name_or_path": drafter.place,
                    "architectures": list(
                        config.architectures or [type(drafter.host.model).__name__]
                    ),
                },
            },
        }

    def serving(self, folder: str, drafter: TrainedDrafter) -> str:
        """Return the command line; the folder names its target."""
        return f"```\nvllm serve {folder}\n```"


class Eagle3Openvino(CountedFromZero):
    """EAGLE-3 for optimum-intel's exporter, whose model OpenVINO GenAI decodes with.

    The exporter knows no layer ids: they have to be written into the model behind it.
    """

    engines = "OpenVINO GenAI (2026.4, converted by optimum-intel 2.2)"
    tags = ("eagle3", "openvino")
    has_tables = True

    def write(self, drafter: TrainedDrafter) -> Exported:
        """Add the maps of a whole vocabulary where all tokens are drafted."""
        if drafter.config.norm_before_residual:
            raise FalconLabError(
                f"the drafter has its norm before the residual, which {self.engines} lacks; train "
                "one with drafter.norm_before_residual=false"
            )
        found = super().write(drafter)
        vocabulary = drafter.host.vocab_size
        whole = vocabulary_maps(torch.arange(vocabulary), vocabulary)
        return Exported(found.config, whole | found.tensors)

    def config(
        self, drafter: TrainedDrafter, taps: list[int], tensors: dict[str, Tensor]
    ) -> dict[str, Any]:
        """Return ``config.json``, which keeps the layers through the exporter."""
        return {**super().config(drafter, taps, tensors), LAYERS: taps}

    def serving(self, folder: str, drafter: TrainedDrafter) -> str:
        """Return how both models are converted, and a few lines of Python."""
        return (
            "```bash\noptimum-cli export openvino --task text-generation-with-past "
            f"--weight-format fp32 -m {drafter.place} openvino/target\n"
            "optimum-cli export openvino --task text-generation-with-past --trust-remote-code "
            f"--weight-format fp32 -m {folder} openvino/converted\n"
            "cp -r openvino/converted openvino/drafter\n"
            "cp openvino/target/openvino_*tokenizer.* openvino/drafter\n```\n\n"
            "```python\nimport json\nfrom pathlib import Path\n\nimport openvino\n"
            "import openvino_genai\n\n"
            'config = json.loads(Path("openvino/converted/config.json").read_text())\n'
            'model = openvino.Core().read_model("openvino/converted/openvino_model.xml")\n'
            f'layers = " ".join(map(str, config["{LAYERS}"]))\n'
            f'model.set_rt_info(layers, "{LAYERS}")  # other layers are read otherwise\n'
            'openvino.save_model(model, "openvino/drafter/openvino_model.xml", '
            "compress_to_fp16=False)\n"
            'draft = openvino_genai.draft_model("openvino/drafter", "CPU")\n'
            'pipeline = openvino_genai.LLMPipeline("openvino/target", "CPU", draft_model=draft)\n'
            f"pipeline.generate(text, num_assistant_tokens={drafter.draft_tokens})\n```"
        )


LAYERS = "hidden_layers_list"
"""What OpenVINO GenAI calls the layers, among the ``rt_info`` of a drafter's model."""

BLOCKS = "backbone.base.layers."


class EagleFormat(ExportFormat):
    """What the engines' formats of EAGLE-1 share; embeddings and LM head are the target's.

    Attributes:
        has_bias: whether inputs are fused with one.
    """

    has_bias = False

    def write(self, drafter: TrainedDrafter) -> Exported:
        """Map names and configuration."""
        host, options = drafter.host, drafter.config
        if options.form != "published":
            raise FalconLabError(
                "its decoder blocks have norms, and its inputs a bias, which engines' EAGLE-1 "
                "lacks; train one with drafter.form=published"
            )
        if "fuse.mix.bias" in drafter.tensors and not self.has_bias:
            raise FalconLabError(
                "its inputs are fused with a bias, which vLLM leaves out without a word; train one "
                "with drafter.bias=null"
            )
        if host.config.model_type != "llama":
            raise FalconLabError(
                f"its decoder blocks are those of {host.config.model_type}, and engines have "
                "EAGLE-1 for llama alone"
            )
        if options.draft_vocabulary is not None:
            raise FalconLabError(
                "engines' EAGLE-1 has no draft vocabulary; train one with "
                "drafter.draft_vocabulary=null"
            )
        plain_tables(host)
        tensors = {_engines_name(name): tensor for name, tensor in drafter.tensors.items()}
        blocks = json.loads(drafter.drafter.backbone.base.config.to_json_string(use_diff=False))
        config = {
            **{key: value for key, value in blocks.items() if key in LLAMA},
            "architectures": ["LlamaForCausalLMEagle"],
            "model_type": "llama",
            "vocab_size": host.vocab_size,
            "num_hidden_layers": options.layers,
            "tie_word_embeddings": False,
            "dtype": dtype_of(tensors),
            "torch_dtype": dtype_of(tensors),
            **token_ids(host.config),
        }
        return Exported(config, tensors)

    def read(self, exported: Exported, drafter: TrainedDrafter) -> dict[str, Tensor]:
        """Map the names back."""
        tensors = dict(exported.tensors)
        ours, bias = {"fuse.mix.weight": tensors.pop("fc.weight")}, tensors.pop("fc.bias", None)
        if bias is not None and drafter.config.bias:
            ours["fuse.mix.bias"] = bias
        for name, tensor in tensors.items():
            ours[BLOCKS + name.removeprefix("layers.")] = tensor
        return ours


LLAMA = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling"),
    *("max_position_embeddings", "attention_bias", "mlp_bias"),
)
"""Keys of a Llama's configuration that decide what its blocks compute."""


def _engines_name(name: str) -> str:
    if name in ("fuse.mix.weight", "fuse.mix.bias"):
        return name.replace("fuse.mix", "fc")
    if not name.startswith(BLOCKS):
        raise FalconLabError(f"among its tensors {name} is one too many")
    return "layers." + name.removeprefix(BLOCKS)


class EagleVllm(EagleFormat):
    """EAGLE-1 for vLLM's ``EagleLlamaForCausalLM``."""

    engines = "vLLM (0.32 and 0.33)"
    tags = ("eagle", "vllm")

    def write(self, drafter: TrainedDrafter) -> Exported:
        """Give vLLM's own name of the class."""
        found = super().write(drafter)
        return Exported({**found.config, "architectures": ["EagleLlamaForCausalLM"]}, found.tensors)

    def serving(self, folder: str, drafter: TrainedDrafter) -> str:
        """Return the command line."""
        return vllm_command(folder, drafter.place, "eagle", drafter.draft_tokens)


class EagleSglang(EagleFormat):
    """EAGLE-1 for SGLang's ``LlamaForCausalLMEagle``, which fuses with a bias."""

    engines = "SGLang (0.5.23)"
    tags = ("eagle", "sglang")
    has_bias = True

    def write(self, drafter: TrainedDrafter) -> Exported:
        """Add a bias of zeros where there is none: SGLang would have a random one."""
        found = super().write(drafter)
        if "fc.bias" in found.tensors:
            return found
        weight = found.tensors["fc.weight"]
        return Exported(found.config, {**found.tensors, "fc.bias": weight.new_zeros(len(weight))})

    def serving(self, folder: str, drafter: TrainedDrafter) -> str:
        """Return the command line; SGLang counts the root among the draft tokens."""
        return sglang_command(folder, drafter.place, "EAGLE", drafter.draft_tokens)
