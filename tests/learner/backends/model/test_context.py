import pytest
import torch
import torch.nn.functional as F

from learner.backends.megatron.model.attention.attention import pack_layout
from learner.backends.megatron.model.attention.context_attention import (
    ContextRanks,
    attend_to_gathered,
    context_layout,
)
from learner.backends.megatron.model.attention.rope import Rope
from learner.backends.megatron.model.attention.state_layout import state_layouts
from learner.backends.megatron.sharding import share_of_rank
from learner.backends.shared.packed_attention import within_sequences
from learner.data.packing import pack
from tests.learner.tiny import random_samples

LENGTHS = [16, 8, 16, 24, 8]
HEADS, GROUPS, WIDTH = 4, 2, 6


def of_whole_sequences(query, key, value, window):
    """Attention of each sequence by itself, [T, heads, d]."""

    def seen(length):
        behind = torch.arange(length)[:, None] - torch.arange(length)
        return (behind >= 0) & (behind < (window or length))

    parts = zip(*(torch.split(x, LENGTHS) for x in (query, key, value)), strict=True)
    return torch.cat([
        F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in part), attn_mask=seen(len(part[0])), enable_gqa=True
        )[0].transpose(0, 1)
        for part in parts
    ])  # fmt: skip


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_the_ranks_compute_apart_is_attention_over_whole_sequences(ranks, window):
    torch.manual_seed(0)
    query = torch.randn(sum(LENGTHS), HEADS, WIDTH)
    key, value = torch.randn(2, sum(LENGTHS), GROUPS, WIDTH)
    expected = of_whole_sequences(query, key, value, window)
    [whole] = pack(random_samples(LENGTHS), 1000)
    shares = [share_of_rank(whole, ranks=ranks, rank=rank) for rank in range(ranks)]
    places = [whole.cu_seqlens[share.sequence_of_token] + share.position_ids for share in shares]
    everywhere = torch.cat(places)
    for rank, here in enumerate(places):
        layout = context_layout(LENGTHS, ranks=ranks, rank=rank, by_length=True)
        found = attend_to_gathered(
            query[here], key[everywhere], value[everywhere], layout, scale=WIDTH**-0.5, window=window
        )
        assert torch.allclose(found, expected[here], atol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "min_tokens", "kinds"),
    [
        (1, 0, {False}), (2, 0, {True}), (4, 0, {True}), (2, 10, {True, False}), (4, 10, {True, False}),
        (2, 100, {False}),
    ],
)  # fmt: skip
def test_states_go_through_whole_sequences_whatever_ranks_share(ranks, min_tokens, kinds):
    [whole] = pack(random_samples([5, 60, 1, 33, 9, 9]), 1000)
    parts = []
    for rank in range(ranks):
        share = share_of_rank(whole, ranks=ranks, rank=rank, min_tokens=min_tokens)
        layouts = state_layouts(share, ContextRanks(ranks, rank), torch.device("cpu"))
        parts += zip(layouts, share.position_ids.split([each.tokens for each in layouts]), strict=True)
    assert {layout.is_cut for layout, _ in parts} == kinds
    of_all_ranks = [positions for layout, positions in parts if layout.is_cut]
    for layout, positions in parts:
        expected = torch.cat(of_all_ranks) if layout.is_cut else positions
        # a token counts those before it in its sequence, whose number is its position
        found = within_sequences(
            lambda ones: ones.cumsum(1) - 1, [torch.ones_like(expected)], layout.buckets, layout.slots
        )
        assert found.equal(expected)


@pytest.mark.parametrize("ring", [False, True])
def test_whole_sequences_need_nothing_of_other_ranks(ring):
    rope = Rope(torch.ones(WIDTH // 2))
    ranks = ContextRanks(2, 0, ring=ring)

    def parts(lengths):
        [whole] = pack(random_samples(lengths), 1000)
        share = share_of_rank(whole, ranks=2, rank=0, min_tokens=20)
        layout = pack_layout(share, [rope], torch.float32, ranks)
        assert len(layout.rotations[0][0]) == len(share.tokens)
        return [(n, part.context is not None, part.ring is not None) for n, part in layout.parts]

    assert parts([9, 9, 8, 8]) == [(17, False, False)]
    assert parts([40, 9, 9]) == [(20, not ring, ring), (9, False, False)]
    assert parts([40, 9]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 6])
def test_the_kernel_for_any_lengths_sees_what_the_other_way_sees(window):
    torch.manual_seed(0)
    layouts = [
        context_layout(LENGTHS, ranks=2, rank=1, by_length=by_length).to(torch.device("cuda"))
        for by_length in (True, False)
    ]
    query = torch.randn(sum(LENGTHS) // 2, HEADS, 64, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, sum(LENGTHS), GROUPS, 64, device="cuda", dtype=torch.bfloat16)
    slow, fast = (
        attend_to_gathered(query, key, value, layout, scale=0.125, window=window) for layout in layouts
    )
    assert torch.allclose(slow, fast, atol=2e-2)
