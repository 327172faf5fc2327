"""Attention over a tree of segments, against each path by itself."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from learner.backends.megatron.model.attention.context_attention import chunks_of_rank
from learner.backends.megatron.model.attention.tree_attention import attend_along_paths, tree_layout

HEADS, GROUPS, WIDTH = 6, 2, 16
TREES = {
    "one sequence": ([9], [-1]),
    "several sequences": ([5, 9, 1], [-1, -1, -1]),
    "siblings": ([20, 7, 1, 30], [-1, 0, 0, 0]),
    "strands of two prompts": ([8, 3, 12, 5, 2, 6, 9, 4, 4], [-1, 0, 0, 2, 2, 4, -1, 6, 6]),
    "a chain": ([4, 4, 4, 4], [-1, 0, 1, 2]),
}


def random_tree(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Segments in depth-first order: the next one follows any of those on the path to the last, or none."""
    lengths, parents = [], []
    for _ in range(rng.integers(1, 14)):
        path, last = [-1], len(parents) - 1
        while last >= 0:
            path.append(last)
            last = parents[last]
        parents.append(int(rng.choice(path)))
        lengths.append(int(rng.integers(1, 12)))
    return lengths, parents


def of_each_path(query, key, value, lengths, parents, scale):
    """Causal attention of the path to each segment by itself, of which the segment's own rows are kept."""
    starts = np.cumsum([0, *lengths])
    rows = [torch.arange(starts[i], starts[i + 1]) for i in range(len(lengths))]
    found = []
    for i, own in enumerate(rows):
        path, parent = own, parents[i]
        while parent >= 0:
            path, parent = torch.cat((rows[parent], path)), parents[parent]
        q, k, v = (x[path].transpose(0, 1)[None] for x in (query, key, value))
        whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        found.append(whole[0].transpose(0, 1)[-len(own) :])
    return torch.cat(found)


def drawn(tokens: int, *, seed: int, width: int = WIDTH, **where: object):
    torch.manual_seed(seed)
    heads = HEADS, GROUPS, GROUPS, HEADS
    return [torch.randn(tokens, n, width, dtype=torch.float64).to(**where).requires_grad_() for n in heads]


def with_gradients(attend, *tensors):
    """The output, and the gradients of query, key and value for the last tensor as that of the output."""
    *inputs, weight = tensors
    output = attend(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, weight.detach())]


@pytest.mark.first(8, others=pytest.mark.slow)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_random_trees_are_attended_to_as_each_of_their_paths(seed, dtype):
    lengths, parents = random_tree(np.random.default_rng(seed))
    tensors = drawn(sum(lengths), seed=seed)
    expected = with_gradients(lambda q, k, v: of_each_path(q, k, v, lengths, parents, 0.3), *tensors)
    layout = tree_layout(lengths, parents)
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    found = with_gradients(lambda q, k, v: attend_along_paths(q, k, v, layout, scale=0.3), *inputs)
    bound = 1e-12 if dtype == torch.float64 else 2e-6
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).abs().max() <= bound * max(1.0, theirs.abs().max())


@pytest.mark.parametrize("name", TREES)
def test_trees_of_any_form_are_attended_to_as_each_of_their_paths(name):
    lengths, parents = TREES[name]
    tensors = drawn(sum(lengths), seed=1)
    expected = with_gradients(lambda q, k, v: of_each_path(q, k, v, lengths, parents, 0.25), *tensors)
    layout = tree_layout(lengths, parents)
    found = with_gradients(lambda q, k, v: attend_along_paths(q, k, v, layout, scale=0.25), *tensors)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found, expected, strict=True))


def test_levels_are_as_many_as_segments_follow_each_other():
    assert [len(tree_layout(*tree).above) for tree in TREES.values()] == [0, 0, 1, 3, 3]


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_share_the_tokens_attend_together_as_one_does(seed, ranks):
    lengths, parents = random_tree(np.random.default_rng(seed))
    tokens = -(-sum(lengths) // (2 * ranks)) * 2 * ranks
    lengths[-1] += tokens - sum(lengths)
    tensors = drawn(tokens, seed=seed)
    expected = with_gradients(lambda q, k, v: of_each_path(q, k, v, lengths, parents, 0.3), *tensors)
    chunk = tokens // (2 * ranks)
    held = [[range(i * chunk, (i + 1) * chunk) for i in chunks_of_rank(ranks, rank)] for rank in range(ranks)]
    rows = [torch.cat([torch.arange(run.start, run.stop) for run in runs]) for runs in held]

    def together(query, key, value):
        """Each rank attends with its queries to the keys of all, laid end to end as they are gathered."""
        found = torch.zeros_like(query)
        for runs, own in zip(held, rows, strict=True):
            layout = tree_layout(lengths, parents, runs, ranks=ranks)
            keys, values = (torch.cat([x[part] for part in rows])[layout.line] for x in (key, value))
            part = attend_along_paths(query[own], keys, values, layout, scale=0.3)
            found = found.index_add(0, own, part)
        return found

    found = with_gradients(together, *tensors)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found, expected, strict=True))


def test_large_scores_do_not_overflow():
    lengths, parents = TREES["siblings"]
    query, key, value, weight = drawn(sum(lengths), seed=2)
    tensors = (200 * query).detach().requires_grad_(), key, value, weight
    expected = with_gradients(lambda q, k, v: of_each_path(q, k, v, lengths, parents, 1.0), *tensors)
    layout = tree_layout(lengths, parents)
    found = with_gradients(lambda q, k, v: attend_along_paths(q, k, v, layout, scale=1.0), *tensors)
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("width", [64, 128])
def test_the_kernel_for_cuda_attends_as_each_path_within_the_error_of_bfloat16(name, width):
    lengths, parents = TREES[name]
    lengths = [17 * length for length in lengths]
    low = {"device": "cuda", "dtype": torch.bfloat16}
    tensors = drawn(sum(lengths), seed=3, width=width, **low)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    expected = with_gradients(lambda q, k, v: of_each_path(q, k, v, lengths, parents, 0.1), *exact)
    apart = with_gradients(lambda q, k, v: of_each_path(q, k, v, lengths, parents, 0.1), *tensors)
    layout = tree_layout(lengths, parents).to(torch.device("cuda"))
    found = with_gradients(lambda q, k, v: attend_along_paths(q, k, v, layout, scale=0.1), *tensors)
    for ours, theirs, exactly in zip(found, apart, expected, strict=True):
        error, usual = ((x.double().cpu() - exactly).norm() / exactly.norm() for x in (ours, theirs))
        assert error < max(2 * usual, 4e-3)
