"""vLLM as the one who reads texts and writes their hidden states (``hidden_states.py``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from falcon_lab.errors import FalconLabError, one_line


def extract(
    target: str,
    folder: Path,
    texts: Sequence[Sequence[int]],
    layers: Sequence[int],
    *,
    dtype: str = "auto",
    tensor_parallel: int = 1,
) -> None:
    """Have vLLM read texts; the connector writes a file for each.

    Args:
        target: folder or hub id.
        folder: of the files.
        texts: tokens of each.
        layers: whose states are written, counted as in ``falcon_lab.data.state_files``.
        dtype: vLLM's; states are kept in it.
        tensor_parallel: devices that share the target.

    Raises:
        FalconLabError: vLLM is not installed, or refuses the target.
    """
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise FalconLabError(
            f"vLLM cannot be imported ({one_line(error)}); give the command in its environment, "
            "with falcon-lab-serving installed there"
        ) from error
    # A text may be as long as the target reads, and vLLM wants room for what follows.
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    try:
        llm = LLM(
            model=target,
            dtype=dtype,
            tensor_parallel_size=tensor_parallel,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {
                    "hf_config": {"eagle_aux_hidden_state_layer_ids": [*layers]}
                },
            },
            kv_transfer_config={
                "kv_connector": "HiddenStatesWriter",
                "kv_role": "kv_producer",
                "kv_connector_module_path": "falcon_lab_serving.hidden_states",
                "kv_connector_extra_config": {"folder": str(folder)},
            },
            enforce_eager=True,
            max_model_len=max(map(len, texts)) + 2,
            enable_prefix_caching=False,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise FalconLabError(f"{target}: vLLM refuses it: {one_line(error)}") from error
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    llm.generate([{"prompt_token_ids": list(text)} for text in texts], sampling)
    # A file is written in the step after its text's last one.
    llm.generate([{"prompt_token_ids": list(texts[0])}], sampling, use_tqdm=False)
