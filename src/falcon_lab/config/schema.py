"""The typed experiment: every key that a YAML may hold, with its default and meaning.

Plain dataclasses of plain types, so that OmegaConf 2.3 and 2.4 both read them and nothing heavy
is imported. What a number or a word may be stands beside its default. A component's node
(``drafter``, ``tree``, …) is a mapping with a ``name``; the rest of it is checked against the
dataclass that the component was registered with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from falcon_lab.environment import WANDB_MODES
from falcon_lab.errors import ConfigError
from falcon_lab.fields import (
    MASSES,
    TEMPERATURES,
    Form,
    Name,
    any_seed,
    choice,
    each_once,
    filled,
    limited,
    named,
    ranged,
)

STAGES = ("target", "data", "distil", "evaluate", "report")

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

FEATURE_DTYPES = ("auto", "float16", "float8_e4m3")


def dtype_name(dtype: object) -> str:
    """Return what ``target.dtype`` calls a dtype of torch's."""
    return str(dtype).removeprefix("torch.")


ATTENTION = ("auto", "sdpa", "eager", "flex_attention", "flash_attn", "torch_flash")

PLAIN, HF_GENERATE = "plain", "HF generate"
"""Methods that every evaluation measures: decoding without a drafter, ours and Hugging Face's."""

METHOD_NAME = Name(reserved=rf"{PLAIN}(, .*)?|HF .*")
"""Names of methods: none is that of a way to decode which an evaluation or a benchmark adds."""

MOST_TOKENS = 2**20
"""Most tokens of a text, and of all that is counted in tokens."""

MOST_STEPS = 10**9
"""Most steps of a training, and of all that is counted in steps or documents."""

Node = dict[str, Any]


def token_count(default: int, *, least: int = 1) -> Any:
    """Return a field of a number of tokens."""
    return ranged(default, least=least, most=MOST_TOKENS)


def step_count(default: int, *, least: int = 1) -> Any:
    """Return a field of a number of steps or documents."""
    return ranged(default, least=least, most=MOST_STEPS)


def any_temperature(default: Any) -> Any:
    """Return a field of a temperature, or of a list of them."""
    return limited(default, TEMPERATURES)


def any_path(default: str | None) -> Any:
    """Return a field of a path, or of a word that stands for one."""
    return filled(default, "name a file or folder, or take the line out")


WANDB_PROJECT = Form(
    r"[^/\\#?%:\r\n]{1,128}", r"W&B wants 1 to 128 characters without / \ # ? % : and line ends"
)
WANDB_TAG = Form(r".{1,64}", "W&B wants 1 to 64 characters")


@dataclass
class ModelShape:
    """Shape of a Llama-like target that is trained from scratch."""

    layers: int = ranged(16, least=1, most=1000)
    hidden: int = ranged(128, least=1, most=2**16)
    intermediate: int = ranged(384, least=1, most=2**18)
    heads: int = ranged(4, least=1, most=1024)
    max_positions: int = token_count(2048, least=2)

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            problem = f"is {self.heads}, which does not divide hidden={self.hidden}"
            raise ConfigError("heads", problem)


@dataclass
class Gate:
    """What a target trained here must reach before its speed-ups deserve trust."""

    parse: float = ranged(0.9, least=0, most=1)
    """Least share of greedy completions that ``ast.parse`` accepts (0 asks for nothing)."""
    distinct: float = ranged(0.3, least=0, most=1)
    """Least share of distinct tokens in greedy completions."""
    prompts: int = ranged(16, least=1, most=10_000)
    """Held-out prompts that are completed."""
    max_new_tokens: int = token_count(192)
    """Length of a completion."""


@dataclass
class PretrainingConfig:
    """Recipe of a target that is trained on first use and cached by its fingerprint."""

    corpus: str = any_path("generated")
    """``generated``, ``stdlib``, a registered corpus, or a folder or file of text or chats."""
    documents: int = step_count(6000)
    """Training documents that are generated, or read at the most."""
    vocabulary: int = ranged(512, least=257, most=2**20)
    """Entries of the byte-level BPE: all bytes, the end of a text, and what is merged."""
    model: ModelShape = field(default_factory=ModelShape)
    length: int = token_count(256, least=2)
    batch_size: int = ranged(4, least=1, most=2**16)
    steps: int = step_count(800)
    lr: float = ranged(3e-3, above=0, most=100)
    warmup_steps: int = step_count(30, least=0)
    weight_decay: float = ranged(0.1, least=0, most=100)
    seed: int = any_seed()
    checkpoint_every: int = step_count(50)
    gate: Gate = field(default_factory=Gate)

    def __post_init__(self) -> None:
        if self.length > self.model.max_positions:
            raise ConfigError(
                "length",
                f"is {self.length}, and the model has {self.model.max_positions} positions; lower "
                "it, or raise model.max_positions",
            )


@dataclass
class TargetConfig:
    """The frozen target LLM."""

    name: str = any_path("tiny-code")
    """A registered target (``falcon-lab plugins``), a hub id, a folder or a GGUF file; a label when
    ``pretraining`` is given."""
    revision: str | None = filled(None, "name a commit, tag or branch, or write null")
    """Commit, tag or branch on the hub."""
    dtype: str = choice("auto", DTYPES)
    """``auto`` (the checkpoint's own), ``float32``, ``bfloat16``, ``float16`` or ``float64``."""
    attention: str = choice("sdpa", ATTENTION)
    """``sdpa``, ``eager`` or ``flex_attention``; ``flash_attn`` (the extra ``flash``) or
    ``torch_flash``, which read the context without a mask and merge a tree into it; or ``auto``,
    which measures those and sdpa when the target is loaded, and says what it took."""
    lean: bool = False
    """Decode through our own short forward pass instead of Hugging Face's modules, where the model
    is Llama-like (the drafter does always). On a CPU that takes the memory of the weights again, if
    half of what is free suffices, for a copy in the order that its matrix kernels want."""
    device: str = limited("auto", Form(r"auto|cpu|cuda(:\d+)?", "write auto, cpu, cuda or cuda:N"))
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``, for evaluation; training follows ``trainer``."""
    pretraining: PretrainingConfig | None = None
    """Train the target from scratch with this recipe, once, and cache it."""
    tune: Node | None = None
    """A tuner's node: train the target further by it, once, and cache what comes of it. That is the
    target then, with respect to which decoding is lossless."""


SERVER_URL = Form(
    r"https?://[^\s/?#@]+(/[^\s?#@]*)?",
    "write http://HOST:PORT/v1, without a key in it (that is read from OPENAI_API_KEY)",
)


@dataclass
class ServerConfig:
    """An OpenAI-compatible server that runs the target, such as vLLM's or SGLang's."""

    url: str = limited("???", SERVER_URL)
    """``http://HOST:PORT/v1``, as clients' ``base_url``. A key is read from ``OPENAI_API_KEY``."""
    model: str | None = filled(None, "name what the server serves, or write null")
    """Name by which it serves the target; null is its only one."""
    concurrency: int = ranged(64, least=1, most=4096)
    """Requests that wait for their answers together."""
    retries: int = ranged(8, least=0, most=1000)
    """Times that a request is sent again where the server is not there, busy (429, 5xx) or cut off;
    the waits between double, to a minute, or are the server's own ``Retry-After``."""
    timeout: float = ranged(600.0, above=0, most=10**6)
    """Seconds within which a text must be written."""


@dataclass
class DataConfig:
    """What the drafter is trained on."""

    corpus: str = any_path("generated")
    """``generated``, ``stdlib``, a registered corpus (``falcon-lab plugins``), a folder or file of
    text, a chat JSONL, or one of the hub: ``sharegpt``, ``ultrachat``, ``perfectblend``, ``gsm8k``,
    ``magpie``, ``nemotron``, ``hermes-fc``, as ``ultrachat:50000`` of that many records (20,000
    unless it is said) and ``ultrachat@PATH`` from a copy."""
    documents: int = step_count(6000)
    """Documents that are generated, or read at the most."""
    regenerate: float = ranged(0.0, least=0, most=1)
    """Share of the training documents whose rest the target writes itself, greedily. It is the
    target's own text that a drafter will have to guess."""
    server: ServerConfig | None = None
    """A server that runs the target and writes in its place what is regenerated."""
    length: int = token_count(256, least=2)
    """Tokens of a packed sequence."""
    batch_size: int = ranged(8, least=1, most=2**16)
    validation: int = ranged(32, least=0, most=10**6)
    """Packed sequences kept for validation."""
    workers: int = ranged(0, least=0, most=128)
    seed: int = any_seed()
    """Seed of the generated corpus and of the order; differs from the run's on purpose."""
    feature_store: str | None = any_path(None)
    """Folder for teacher features on disk; null computes them on line."""
    feature_store_dtype: str = choice("auto", FEATURE_DTYPES)
    """``auto`` keeps them in the target's own precision; ``float16`` and ``float8_e4m3`` with a
    scale for every position, which is measured and said, and a little other than on line."""
    feature_store_taps: list[int] = each_once(ranged([], least=0, most=2**16))
    """Layers whose hidden states the store keeps beside those that the drafter reads, for drafters
    that are trained from it later."""
    extracted_states: str | None = any_path(None)
    """Folder of hidden states that vLLM has written, from which the feature store is filled."""
    chat_template: str | None = any_path(None)
    """``plain``, or a file with a Jinja template, for chats in place of the tokenizer's own."""

    def __post_init__(self) -> None:
        if self.extracted_states is not None and self.feature_store is None:
            problem = "fills a feature store, and there is none; set data.feature_store to a folder"
            raise ConfigError("extracted_states", problem)


@dataclass
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = ranged(2e-3, above=0, most=100)
    betas: list[float] = ranged([0.9, 0.95], least=0, below=1)
    weight_decay: float = ranged(0.01, least=0, most=100)
    warmup_steps: int = step_count(20, least=0)
    final_lr: float = ranged(0.02, least=0, most=1)
    """Fraction of ``lr`` at the last step."""

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise ConfigError("betas", f"is {self.betas}; give two in [0, 1)")


@dataclass
class DistillationConfig:
    """Training of the drafter beside what ``trainer`` says."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    noise: float = ranged(0.1, least=0, most=1000)
    """Input features get uniform noise in (-noise, noise)."""
    repeats: int = ranged(1, least=1, most=1000)
    """Times that the student studies each batch of a teacher pass, under block phases, noise and
    glances of its own each time."""
    least_squares: int = step_count(0, least=0)
    """Tokens from which a drafter's first weights are solved by least squares (0: those it has).
    A head's fuse must be linear, and queries mapped."""
    start: str | None = any_path(None)
    """Folder or name of a saved drafter, of the kind and options of ``drafter``, whose weights the
    training begins with; null: fresh ones."""
    own_features: float = ranged(0.0, least=0, most=1)
    """Share of the blocks whose input features are the drafter's own, predicted in a first pass
    (not in the paper)."""
    unroll: int = ranged(1, least=1, most=100)
    """Passes that the student is trained on: each after the first continues from the features that
    it predicted itself and the true tokens, as in drafting (EAGLE-3's training-time test; not in
    Falcon's paper). The loss is a mean over the rows of all passes. A drafter that has weights of
    its own for every pass needs as many."""
    unroll_decay: float = ranged(1.0, least=1e-3, most=1)
    """Weight of a row in the loss falls by this factor from pass to pass; EAGLE-3's is 0.8."""
    logits_mib: int = ranged(256, least=1, most=2**20)
    """MiB that the student's and the target's logits may take together, in float32; the loss is
    computed for as many rows at a time. An objective's own tensors come on top: Falcon's take one
    and a half times as much. The default is 256 rows of a vocabulary of 128k, about where a current
    GPU's products stop waiting for the head to be read."""
    save_dtype: str = choice("auto", ("auto", "float32", "bfloat16"))
    """Of the saved drafter's weights: ``auto`` (as trained), ``float32`` or ``bfloat16``, half as
    large. It drafts in the target's own precision in any case. A finished run's drafter is saved
    again."""
    compile: bool = False
    """Send the drafter's decoder blocks through ``torch.compile`` while training (with
    ``unroll: 1``)."""
    checkpoint_every: int = step_count(50)
    """Steps between resumable checkpoints."""
    decode_every: int = step_count(0, least=0)
    """Steps between real decodings of a few validation prompts (0: never)."""
    decode_prompts: int = ranged(2, least=1, most=10_000)
    decode_tokens: int = token_count(64)


@dataclass
class DecodingConfig:
    """How engines run the target and the drafter; what they write does not depend on it."""

    prefill_chunk: int = token_count(2048)
    """Prompt tokens that one forward pass reads. A pass of a few hundred is bound by arithmetic
    already; longer ones only take more memory."""
    kv_memory: float | None = ranged(None, above=0, most=2**16)
    """GiB that the key/value caches of a sequence, target's and drafter's, may take together; null
    is what the device has free."""
    compile: str = choice("none", ("none", "drafter", "all"))
    """``drafter`` or ``all`` (the target's steps and verifications too): compile the passes of
    decoding for a few numbers of tokens, the first time for up to a minute each. On a GPU they
    become
    CUDA graphs, within a second; one sequence is then decoded at a time."""


@dataclass
class PromptsConfig:
    """The prompts of the evaluation."""

    name: str = any_path("heldout")
    """``heldout`` or ``validation`` (of the data's corpus), ``stdlib``, ``humaneval``, ``gsm8k``,
    ``mt_bench``, or a JSONL file in the MT-bench format."""
    limit: int | None = ranged(None, least=1, most=10**6)
    """Prompts at the most."""
    prompt_tokens: int = token_count(96)
    """Tokens of a held-out prompt."""
    texts: list[str] = filled([], "is empty; leave it out")
    """Prompts of your own, in place of a set."""


@dataclass
class MethodConfig:
    """One method that is measured. Parts left out are the experiment's own."""

    drafter: Node | None = None
    """A training-free drafter's node; null is the drafter that this run trained."""
    drafter_path: str | None = any_path(None)
    """A saved drafter's folder, or the name of a registered one (``falcon-lab plugins``)."""
    tree: Node | None = None
    acceptance: Node | None = None
    controller: Node | None = None
    engine: Node | None = None
    """A decoding loop of a plug-in's own, in place of all of these."""
    optional: bool = False
    """Leave the method out, and note it, when its plug-in or its folder is not there."""


@dataclass
class EvaluationConfig:
    """The paired measurement."""

    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    max_new_tokens: int = token_count(128)
    temperature: float = any_temperature(0.0)
    top_k: int = ranged(0, least=0, most=2**31 - 1)
    top_p: float = limited(1.0, MASSES)
    stop: list[str] = limited([], Form(".+", "it would end every answer at once; leave it out"))
    """Strings that end an answer; what stands before them belongs to the answer."""
    repeats: int = ranged(3, least=1, most=1000)
    """Timed passes over the prompts; the median of each prompt counts."""
    warmup: int = ranged(1, least=0, most=10_000)
    """Prompts decoded by every method before the clock starts."""
    threads: int | None = ranged(None, least=1, most=1024)
    """CPU threads of torch while decoding; null: as torch chose."""
    hf_generate: bool = True
    """Measure Hugging Face ``generate`` beside our loops."""
    seed: int = any_seed()
    methods: dict[str, MethodConfig] = named(METHOD_NAME)


@dataclass
class WandbConfig:
    """Weights & Biases: offline by default."""

    mode: str | None = choice(None, WANDB_MODES)
    """``offline``, ``online``, ``disabled``; null: offline, or online inside a sweep."""
    project: str = limited("falcon-lab", WANDB_PROJECT)
    entity: str | None = filled(None, "name one, or write null")
    group: str | None = filled(None, "name one, or write null")
    tags: list[str] = limited([], WANDB_TAG)


@dataclass
class ReportConfig:
    """What the report shows."""

    html: bool = True
    title: str | None = None


@dataclass
class Experiment:
    """One YAML."""

    name: str = limited("experiment", Name())
    seed: int = any_seed()
    out: str = any_path("runs/${name}")
    stages: list[str] = each_once(choice(list(STAGES), STAGES))
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    drafter: Node = field(default_factory=lambda: {"name": "falcon"})
    glancing: Node = field(default_factory=lambda: {"name": "csgd"})
    objective: Node = field(default_factory=lambda: {"name": "falcon"})
    tree: Node = field(default_factory=lambda: {"name": "chain"})
    acceptance: Node = field(default_factory=lambda: {"name": "auto"})
    controller: Node = field(default_factory=lambda: {"name": "fixed"})
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    trainer: Node = field(default_factory=dict)
    """Arguments of the installed ``lightning.Trainer``."""
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    seeds: list[int] = each_once(any_seed([]))
    """Seeds that a comparison trains every head with; empty is the experiment's own seed. A run
    with seeds is a comparison of one head."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("stages", f"is empty; name some of {', '.join(STAGES)}")
        recipe, wanted = self.target.pretraining, {"data", "distil"} & set(self.stages)
        if recipe and wanted and self.data.length > recipe.model.max_positions:
            raise ConfigError(
                "data.length",
                f"is {self.data.length}, and the target has {recipe.model.max_positions} positions "
                "(target.pretraining.model.max_positions); lower it",
            )
