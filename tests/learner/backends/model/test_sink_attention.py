"""Attention with sinks against the softmax written out."""

import pytest
import torch

from learner.backends.megatron.model.attention.context_attention import attend_to_gathered, context_layout
from learner.backends.megatron.model.attention.key_sets import key_sets
from learner.backends.megatron.model.attention.sink_attention import attend_with_sinks
from learner.backends.shared.packed_attention import seen_keys

HEADS, GROUPS, WIDTH, SCALE = 4, 2, 16, 0.3
QUERIES, KEYS = [5, 8, 1, 12], [5, 20, 9, 12]


def written_out(query, key, value, sinks, window):
    """One run, [q, heads, d]: the sink is one more column of the softmax."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = SCALE * torch.einsum("qhd,khd->hqk", query, key)
    scores = scores.masked_fill(~seen_keys(len(query), len(key), window, query.device), -torch.inf)
    column = sinks[:, None, None].expand(-1, len(query), 1)
    shares = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", shares, value)


def inputs(dtype, device="cpu", width=WIDTH):
    torch.manual_seed(0)
    sizes = (sum(QUERIES), HEADS), (sum(KEYS), GROUPS), (sum(KEYS), GROUPS)
    tensors = [torch.randn(*size, width, dtype=dtype, device=device) for size in sizes]
    return [tensor.requires_grad_() for tensor in (*tensors, torch.randn(HEADS, dtype=dtype, device=device))]


def of_runs(query, key, value, sinks, window):
    runs = zip(query.split(QUERIES), key.split(KEYS), value.split(KEYS), strict=True)
    return torch.cat([written_out(*run, sinks, window) for run in runs])


@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
def test_outputs_and_gradients_are_those_of_the_softmax_written_out(window):
    given = inputs(torch.float64)
    sets = key_sets(QUERIES, KEYS, causal=True)
    found = attend_with_sinks(*given, sets, scale=SCALE, window=window)
    expected = of_runs(*given, window)
    assert (found - expected).abs().max() < 1e-12
    weights = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), given) for each in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() < 1e-11


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4, 9])
def test_kernels_for_cuda_agree_with_the_softmax_written_out(window):
    given = inputs(torch.bfloat16, "cuda", 64)
    sets = key_sets(QUERIES, KEYS, causal=True).to(torch.device("cuda"))
    found = attend_with_sinks(*given, sets, scale=SCALE, window=window)
    wide = [tensor.detach().float().requires_grad_() for tensor in given]
    expected = of_runs(*wide, window)
    assert torch.allclose(found.float(), expected, atol=3e-2)
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((found.float() * weights).sum(), given)
    for one, other in zip(ours, torch.autograd.grad((expected * weights).sum(), wide), strict=True):
        assert (one.float() - other).norm() < 2e-2 * other.norm()


@pytest.mark.parametrize("by_length", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_ranks_that_share_sequences_see_what_one_sees(window, by_length):
    lengths, ranks = [16, 8, 24], 2
    torch.manual_seed(0)
    query = torch.randn(sum(lengths), HEADS, WIDTH)
    key, value = torch.randn(2, sum(lengths), GROUPS, WIDTH)
    sinks = torch.randn(HEADS)
    runs = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    expected = torch.cat([written_out(*run, sinks, window) for run in runs])
    chunks = [part.chunk(2 * ranks) for part in torch.arange(sum(lengths)).split(lengths)]
    places = [torch.cat([part[i] for part in chunks for i in (rank, 3 - rank)]) for rank in range(ranks)]
    everywhere = torch.cat(places)
    for rank, here in enumerate(places):
        layout = context_layout(lengths, ranks=ranks, rank=rank, by_length=by_length)
        found = attend_to_gathered(
            query[here], key[everywhere], value[everywhere], layout, scale=SCALE, window=window, sinks=sinks
        )
        assert (found - expected[here]).abs().max() < 1e-6
