"""Stand in, on any CPU and in float32, for the kernels with which SGLang speculates on a CPU.

SGLang 0.5.23 imports these by name. Its own are in C++, for processors with AMX and for bfloat16,
and no package registry has them; these do what their callers document, one sequence after the
other. Only what speculative decoding calls is here.

``FALCON_LAB_VERIFIED`` names a file to which every verification adds a line: the tokens that SGLang
had drafted.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import scaled_dot_product_attention

VERIFIED = "FALCON_LAB_VERIFIED"
QLEN_ONLY = 1
"""The form of a tree's mask that SGLang takes on a CPU: [nodes, nodes], without the text."""


def _attended(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, rows: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Return [queries, heads, size]: attention over the cache's rows of one sequence."""
    keys, values = k_buffer[rows].transpose(0, 1), v_buffer[rows].transpose(0, 1)
    found = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != keys.shape[0],
    )
    return found[0].transpose(0, 1)


def _plain(logit_cap: float, across: bool, window: int, sinks: Tensor | None) -> None:
    """Refuse attention that is not plain."""
    if logit_cap or across or window > 0 or sinks is not None:
        raise NotImplementedError("caps, windows, sinks and cross attention are not stood in for")


def decode_attention_cpu(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    out: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    places: Tensor | None,
    scratch: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    logit_cap: float,
    across: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Write keys and values of one token a sequence, and attend with it to its text."""
    _plain(logit_cap, across, window, sinks)
    if k is not None and v is not None:
        k_buffer[places] = k.view(-1, *k_buffer.shape[1:])
        v_buffer[places] = v.view(-1, *v_buffer.shape[1:])
    for i, (row, length) in enumerate(_rows(req_pool_indices, seq_lens)):
        rows = req_to_token[row, :length].long()
        out[i : i + 1] = _attended(q[i : i + 1], k_buffer, v_buffer, rows, None, scale)


def extend_attention_cpu(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    out: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    longest: int,
    scale: float,
    logit_cap: float,
    across: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    causal: bool,
) -> None:
    """Attend with the newest tokens of each sequence, whose keys and values are in the cache."""
    _plain(logit_cap, across or not causal, window, sinks)
    sequences = zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
        strict=True,
    )
    for i, (row, length, count, start) in enumerate(sequences):
        rows = req_to_token[row, :length].long()
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        if tree_mask is not None:
            tree = tree_mask.view(-1, count, count)[i]
            mask[:, length - count :] = tree.bool()
        queries = q[start : start + count]
        out[start : start + count] = _attended(queries, k_buffer, v_buffer, rows, mask, scale)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    steps: int,
    pool_len: int,
) -> Tensor:
    """Return a row a branch: the places of its text, and behind them those of its own steps."""
    found = torch.zeros(len(seq_lens) * topk, pool_len, dtype=req_to_token.dtype)
    for i, (row, length) in enumerate(_rows(req_pool_indices, seq_lens)):
        for branch in range(topk):
            begin = length + branch * steps
            made = found[i * topk + branch]
            made[:length] = req_to_token[row, :length]
            made[length : length + steps] = req_to_token[row, begin : begin + steps]
    return found


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Give places of the cache to positions of each sequence, one sequence after the other."""
    for given, places in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[given] = out_cache_loc[places].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read the places of positions of each sequence, one sequence after the other."""
    for given, places in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[places] = req_to_token[given].to(out_cache_loc.dtype)


def _spans(rows: Tensor, starts: Tensor, ends: Tensor) -> Iterator[tuple[tuple[int, slice], slice]]:
    """Yield row and positions of each sequence, and their places behind those before."""
    used = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield (row, slice(start, end)), slice(used, used + end - start)
        used += end - start


def _rows(req_pool_indices: Tensor, seq_lens: Tensor) -> list[tuple[int, int]]:
    """Return row and length of each sequence."""
    return list(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True))


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    steps: int,
) -> None:
    """Read the places behind each text that its drafts will take."""
    ends = seq_lens + topk * steps
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len
    )


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int
) -> None:
    """Take the last token that each round added."""
    last = torch.arange(len(accept_lens)) * stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Take the places of accepted nodes, without gaps."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, to_places: Tensor, from_places: Tensor
) -> None:
    """Move rows of all layers' caches, which are given by address and bytes a row."""
    pairs = list(zip(to_places.tolist(), from_places.tolist(), strict=True))
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + source * size, size) for _, source in pairs]
        for (place, _), row in zip(pairs, rows, strict=True):
            ctypes.memmove(address + place * size, row, size)


def rotate_input_ids_cpu(*given: Any) -> None:
    """Refuse what heads of several layers would need."""
    raise NotImplementedError("drafters of several layers are not stood in for")


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    nodes: int,
    mask_mode: int,
) -> None:
    """Write the tree of the selected candidates: its mask, its positions, its links."""
    if int(mask_mode) != QLEN_ONLY:
        raise NotImplementedError(f"a mask of mode {mask_mode} is not stood in for")
    for b, length in enumerate(verified_seq_len.tolist()):
        chosen = selected_index[b].tolist()
        parents = [-1]
        for candidate in chosen:
            group = candidate // topk
            parents.append(0 if group == 0 else chosen.index(int(parent_list[b, group])) + 1)
        _write_tree(
            parents,
            length,
            (tree_mask.view(-1, nodes, nodes)[b], positions.view(-1, nodes)[b]),
            (retrieve_index[b], retrieve_next_token[b], retrieve_next_sibling[b]),
            b * nodes,
        )


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    nodes: int,
) -> None:
    """Write positions and links of trees that are given by their masks."""
    masks = tree_mask.view(-1, nodes, nodes)
    for b, length in enumerate(verified_seq_len.tolist()):
        above = [[j for j in range(i) if masks[b, i, j]] for i in range(nodes)]
        parents = [max(each, default=-1) for each in above]
        _write_tree(
            parents,
            length,
            (masks[b].clone(), positions.view(-1, nodes)[b]),
            (
                retrieve_index.view(-1, nodes)[b],
                retrieve_next_token.view(-1, nodes)[b],
                retrieve_next_sibling.view(-1, nodes)[b],
            ),
            b * nodes,
        )


def _write_tree(
    parents: list[int],
    length: int,
    places: tuple[Tensor, Tensor],
    links: tuple[Tensor, Tensor, Tensor],
    first: int,
) -> None:
    """Write a tree's mask and positions, and for each node its row, first child and sibling."""
    mask, positions = places
    rows, children, siblings = links
    mask.zero_()
    children.fill_(-1)
    siblings.fill_(-1)
    newest: dict[int, int] = {}
    for node, parent in enumerate(parents):
        rows[node] = first + node
        if node:
            mask[node] = mask[parent]
            if parent in newest:
                siblings[newest[parent]] = node
            else:
                children[parent] = node
            newest[parent] = node
        mask[node, node] = True
        positions[node] = length + int(mask[node].sum()) - 1


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk down each tree as long as a child is what the target predicts."""
    told = target_predict.reshape(-1)
    for b, tokens in enumerate(candidates.tolist()):
        node, accepted = 0, [0]
        while len(accepted) < accept_index.shape[1]:
            wanted = int(told[int(retrive_index[b, node])])
            child = int(retrive_next_token[b, node])
            while child >= 0 and tokens[child] != wanted:
                child = int(retrive_next_sibling[b, child])
            if child < 0:
                break
            node = child
            accepted.append(node)
        for i, each in enumerate(accepted):
            row = int(retrive_index[b, each])
            accept_index[b, i] = row
            predicts[row] = told[row]
        accept_token_num[b] = len(accepted) - 1
        _tell(tokens[1:])


def _tell(drafted: list[int]) -> None:
    """Write a verification down where somebody asks for it."""
    if place := os.environ.get(VERIFIED):
        with Path(place).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(drafted)}\n")


# SGLang's attention asks torch for these two
custom_op("sgl_kernel::decode_attention_cpu", mutates_args=("out", "k_buffer", "v_buffer"))(
    decode_attention_cpu
)
custom_op("sgl_kernel::extend_attention_cpu", mutates_args=("out",))(extend_attention_cpu)
