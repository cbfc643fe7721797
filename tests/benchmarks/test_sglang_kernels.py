"""What stands for SGLang's compiled kernels in ``benchmarks/interop`` does what it should."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from running import ROOT

PARENTS = [-1, 0, 0, 1, 1, 3]
"""A tree of six nodes, the root among them."""
TOKENS = [9, 5, 6, 7, 8, 7]
LENGTH = 4
"""Of the text before the tree."""


@pytest.fixture(scope="module")
def kernels() -> Any:
    path = ROOT / "benchmarks" / "interop" / "sglang_kernels.py"
    spec = importlib.util.spec_from_file_location("sglang_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def path_to(node: int) -> list[int]:
    return [] if node < 0 else [*path_to(PARENTS[node]), node]


def ancestors() -> Tensor:
    mask = torch.zeros(1, len(PARENTS), len(PARENTS), dtype=torch.bool)
    for node in range(len(PARENTS)):
        mask[0, node, path_to(node)] = True
    return mask


def empty_links() -> list[Tensor]:
    return [torch.full((1, len(PARENTS)), -7) for _ in range(4)]


def test_a_tree_given_by_its_mask_has_positions_and_links(kernels: Any) -> None:
    positions, rows, children, siblings = links = empty_links()
    kernels.reconstruct_indices_from_tree_mask(
        ancestors().flatten(), torch.tensor([LENGTH]), *links, 1, len(PARENTS)
    )
    assert positions.tolist() == [[4, 5, 5, 6, 6, 7]]
    assert rows.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert children.tolist() == [[1, 3, -1, 5, -1, -1]]
    assert siblings.tolist() == [[-1, 2, -1, 4, -1, -1]]


def test_a_tree_of_selected_candidates_is_that_of_its_mask(kernels: Any) -> None:
    # two candidates a level; candidate c is the (c % 2)-th below what parents[c // 2] is
    parents = torch.tensor([[-1, 0, 1, 2]])
    selected = torch.tensor([[0, 1, 2, 3, 4]])
    mask, built = torch.zeros(36, dtype=torch.bool), empty_links()
    kernels.build_tree_kernel_efficient_cpu(
        parents, selected, torch.tensor([LENGTH]), mask, *built, 2, 3, 6, 1
    )
    # 0 and 1 hang on the root, 2 and 3 on candidate 0, 4 on candidate 1
    above = mask.view(6, 6).tril(-1)
    assert [int(row.nonzero()[-1]) for row in above[1:]] == [0, 0, 1, 1, 2]
    read = empty_links()
    kernels.reconstruct_indices_from_tree_mask(mask, torch.tensor([LENGTH]), *read, 1, 6)
    for one, other in zip(built, read, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("told", [[5, 7, 0, 7, 0, 3], [6, 0, 1, 0, 0, 0], [0] * 6])
def test_the_longest_path_that_the_target_predicts_is_accepted(
    kernels: Any, told: list[int]
) -> None:
    links = empty_links()
    kernels.reconstruct_indices_from_tree_mask(
        ancestors().flatten(), torch.tensor([LENGTH]), *links, 1, len(PARENTS)
    )
    predicts = torch.full((6,), -1, dtype=torch.int32)
    index, count = torch.full((1, 5), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts, index, count, torch.tensor([TOKENS]), *links[1:], torch.tensor([told])
    )
    paths = [path_to(node) for node in range(len(PARENTS))]
    right = [p for p in paths if all(TOKENS[c] == told[a] for a, c in pairwise(p))]
    expected = max(right, key=len)
    assert index[0, : len(expected)].tolist() == expected
    assert count.tolist() == [len(expected) - 1]
    assert predicts[expected].tolist() == [told[node] for node in expected]


def test_a_node_attends_as_if_its_path_alone_were_read(kernels: Any) -> None:
    torch.manual_seed(0)
    count = len(PARENTS)
    queries, keys = torch.randn(count, 4, 8), torch.randn(20, 2, 8)
    values, out = torch.randn(20, 2, 8), torch.empty(count, 4, 8)
    places = torch.randperm(20)[: LENGTH + count].int()[None]
    sizes = [torch.tensor([each]) for each in (0, LENGTH + count, count, 0)]
    kernels.extend_attention_cpu(
        *(queries, None, None, out, keys, values, 1.0, 1.0, places, *sizes, count, 0.3),
        *(0.0, False, 0, None, None, ancestors().flatten(), True),
    )
    for node in range(count):
        read = places[0, [*range(LENGTH), *(LENGTH + each for each in path_to(node))]].long()
        alone = scaled_dot_product_attention(
            queries[node][None, :, None],
            keys[read].transpose(0, 1)[None],
            values[read].transpose(0, 1)[None],
            scale=0.3,
            enable_gqa=True,
        )
        torch.testing.assert_close(out[node], alone[0, :, 0])


def test_a_token_attends_to_its_text_and_to_itself(kernels: Any) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 8), torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    keys, values, out = torch.randn(20, 2, 8), torch.randn(20, 2, 8), torch.empty(1, 4, 8)
    places = torch.randperm(20)[: LENGTH + 1].int()[None]
    scratch = torch.empty(0)
    kernels.decode_attention_cpu(
        *(query, keys, values, 1.0, 1.0, out, key, value, places[0, -1:].long(), scratch, places),
        *(torch.tensor([0]), torch.tensor([LENGTH + 1]), 0.3, 0.0, False, 0, None, None),
    )
    read = places[0].long()
    assert torch.equal(keys[read[-1]], key[0])
    alone = scaled_dot_product_attention(
        query[0][None, :, None],
        keys[read].transpose(0, 1)[None],
        values[read].transpose(0, 1)[None],
        scale=0.3,
        enable_gqa=True,
    )
    torch.testing.assert_close(out[0], alone[0, :, 0])


def test_places_are_given_and_read_a_sequence_after_the_other(kernels: Any) -> None:
    table = torch.zeros(3, 10, dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([3, 7])
    places = torch.tensor([11, 12, 13, 14, 15])
    kernels.assign_req_to_token_pool_cpu(rows, table, starts, ends, places, 10)
    assert table[2, 1:3].tolist() == [11, 12]
    assert table[0, 4:7].tolist() == [13, 14, 15]
    read = torch.zeros(5, dtype=torch.long)
    kernels.assign_extend_cache_locs_cpu(rows, table, starts, ends, read, 10)
    assert torch.equal(read, places)
    draft = torch.zeros(2, dtype=torch.long)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows[:1], table, starts[:1], draft, 10, 1, 2)
    assert draft.tolist() == [11, 12]


def test_a_branch_reads_its_text_and_its_own_steps(kernels: Any) -> None:
    table = torch.arange(10, dtype=torch.int32)[None]
    found = kernels.build_draft_decode_metadata_cpu(
        table, torch.tensor([0]), torch.tensor([3]), 2, 3, 10
    )
    assert found[:, :6].tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 6, 7, 8]]


def test_rows_of_every_layer_move_at_once(kernels: Any) -> None:
    layers = [torch.arange(12.0).view(6, 2), -torch.arange(18.0).view(6, 3)]
    before = [each.clone() for each in layers]
    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([each.data_ptr() for each in layers]),
        torch.tensor([each.stride(0) * 4 for each in layers]),
        torch.tensor([1, 2]),
        torch.tensor([2, 5]),
    )
    for now, then in zip(layers, before, strict=True):
        assert torch.equal(now, then[[0, 2, 5, 3, 4, 5]])


def test_what_a_round_added_is_taken(kernels: Any) -> None:
    bonus = torch.zeros(2, dtype=torch.int32)
    tokens = torch.tensor([[7, 8, 0], [9, 0, 0]], dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(tokens.flatten(), torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [8, 9]
    places = torch.zeros(3, dtype=torch.long)
    index = torch.tensor([[0, 2, -1], [4, -1, -1]])
    kernels.fill_accept_out_cache_loc_cpu(index, torch.arange(10, 16), places)
    assert places.tolist() == [10, 12, 14]


def test_attention_that_is_not_stood_in_for_is_refused(kernels: Any) -> None:
    nothing = torch.empty(0)
    with pytest.raises(NotImplementedError, match="windows"):
        kernels.decode_attention_cpu(
            *(nothing, nothing, nothing, 1.0, 1.0, nothing, None, None, None, nothing, nothing),
            *(nothing, nothing, 1.0, 0.0, False, 8, None, None),
        )
