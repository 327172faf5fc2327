"""Exact arithmetic is near the true results, and the same to the bit among whatever other numbers."""

from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.errors import ConfigError
from storage.exact_arithmetic import attention, elementary, functions, self_check, softmax, sums
from storage.exact_arithmetic.self_check import refuse_other_arithmetic
from tests.storage.exact_arithmetic.threads import two_threads

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_elementary_functions_are_near_the_true_ones():
    x = torch.linspace(-86.9, 87.9, 100_003)
    assert ((elementary.exp(x) / x.double().exp()) - 1).abs().max() < 1.2e-7
    assert (elementary.silu(x) - torch.nn.functional.silu(x.double())).abs().max() < 4e-6
    wide = torch.linspace(1e-9, 1e6, 10_001, dtype=torch.float64)
    assert (elementary.log(wide) - wide.log()).abs().max() < 2e-14
    angles = torch.linspace(-1e5, 1e5, 100_003)
    cos, sin = elementary.cos_sin(angles)
    assert (cos - angles.double().cos()).abs().max() < 4e-8
    assert (sin - angles.double().sin()).abs().max() < 4e-8
    positive = torch.linspace(1e-6, 30, 10_001)
    assert (elementary.reciprocal_sqrt(positive) * positive.double().sqrt() - 1).abs().max() < 1.2e-7


def test_the_exponential_has_its_limits():
    ends = torch.tensor([-torch.inf, -1e9, 0.0, 1e9, torch.nan])
    assert elementary.exp(ends)[:3].tolist() == [0.0, 0.0, 1.0]
    assert elementary.exp(ends)[3] > 1e38
    assert elementary.exp(ends)[4].isnan()


@pytest.mark.parametrize("function", [elementary.exp, elementary.silu, elementary.reciprocal_sqrt])
def test_elementary_functions_do_not_depend_on_place_neighbours_or_threads(function):
    x = drawn(3 * elementary.PIECE + 17).abs()
    whole = function(x)
    with two_threads():
        assert torch.equal(function(x), whole)
    for start, length in ((0, 1), (5, 31), (elementary.PIECE - 3, 70), (1000, elementary.PIECE + 5)):
        assert torch.equal(function(x[start : start + length]), whole[start : start + length])
    spread = torch.zeros(len(x), 2)
    spread[:, 1] = x
    assert torch.equal(function(spread[:, 1]), whole), "not contiguous"


def test_products_are_exact_sums_of_rounded_factors():
    x, weight = drawn(3, 50), drawn(4, 50, seed=1) * 0.02
    row_bits, column_bits = sums.term_bits(50)
    rows, row_unit = sums.to_integers(x, row_bits)
    columns, column_unit = sums.to_integers(weight, column_bits)
    found = sums.IntegerWeight(weight).product(x)
    for i in range(3):
        for j in range(4):
            pairs = zip(rows[i].tolist(), columns[j].tolist(), strict=True)
            true = sum(Fraction(a) * Fraction(b) for a, b in pairs)
            unit = Fraction(row_unit[i].item()) * Fraction(column_unit[j].item())
            assert found[i, j].item() == torch.tensor(float(true * unit), dtype=torch.float64).float().item()
    assert (found - x.double() @ weight.double().t()).abs().max() < 1e-6


@settings(max_examples=25, deadline=None)
@given(
    terms=st.integers(1, 700), rows=st.integers(1, 40), outputs=st.integers(1, 70), seed=st.integers(0, 99),
    threads=st.sampled_from([1, 2]), large=st.sampled_from([1.0, 1e4]),
)  # fmt: skip
def test_a_row_of_a_product_does_not_depend_on_the_others(terms, rows, outputs, seed, threads, large):
    x, weight = drawn(rows, terms, seed=seed), drawn(outputs, terms, seed=seed + 1)
    x[:, 0] *= large
    with two_threads() if threads == 2 else nullcontext():
        together = functions.linear(x, weight)
    row = seed % rows
    assert torch.equal(functions.linear(x[row : row + 1], weight), together[row : row + 1])
    assert torch.equal(functions.linear(x, weight[: 1 + outputs // 2]), together[:, : 1 + outputs // 2])


def test_sums_do_not_depend_on_order_or_on_zeros_among_them():
    x = drawn(5, 999).abs() / 9
    shuffled = x[:, torch.randperm(999, generator=torch.Generator().manual_seed(3))]
    assert torch.equal(sums.exact_sum(x), sums.exact_sum(shuffled))
    padded = torch.nn.functional.pad(shuffled.clamp(max=1.0), (0, 5000))
    assert torch.equal(sums.sum_of_fractions(x.clamp(max=1.0)), sums.sum_of_fractions(padded))
    assert (sums.exact_sum(x)[:, 0] - x.double().sum(-1)).abs().max() < 1e-10


def test_log_probs_within_a_kept_set_are_those_of_the_gathered_logits():
    logits = drawn(4, 300) * 5
    kept = torch.tensor([3, 250, 17, 80])
    outside = torch.ones(300, dtype=torch.bool).index_fill(0, kept, False)
    of_whole = softmax.log_softmax(logits.masked_fill(outside, -torch.inf))[:, kept]
    assert torch.equal(of_whole, softmax.log_softmax(logits[:, kept]))
    assert (softmax.log_softmax(logits) - logits.double().log_softmax(-1)).abs().max() < 5e-6


def test_a_query_gets_the_same_from_any_batch_cache_and_block(monkeypatch):
    query, key, value = (drawn(2, heads, 45, 16, seed=heads) for heads in (4, 2, 2))
    value[:, :, 30:] *= 1e3  # what later keys bring must not change the units of earlier queries
    together = attention.attend(query, key, value, scale=0.25)
    ordinary = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.25, enable_gqa=True
    )
    assert ((together - ordinary).abs() / ordinary.abs().amax()).max() < 1e-5
    prefix = attention.attend(query[1:, :, :20], key[1:, :, :20], value[1:, :, :20], scale=0.25)
    assert torch.equal(prefix, together[1:, :, :20])
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 2000)
    assert torch.equal(attention.attend(query, key, value, scale=0.25), together)
    seen = torch.arange(45) < torch.tensor([[30], [12]])
    last = torch.stack((query[0, :, 29:30], query[1, :, 11:12]))
    decoded = attention.attend(last, key, value, scale=0.25, seen=seen)
    assert torch.equal(decoded[0, :, 0], together[0, :, 29])
    assert torch.equal(decoded[1, :, 0], together[1, :, 11])


def test_gradients_are_those_of_the_ordinary_functions():
    x, weight = drawn(6, 40).requires_grad_(), drawn(9, 40, seed=1).requires_grad_()

    def loss(linear, mean, silu, rsqrt):
        hidden = silu(linear(x * rsqrt(mean(x.pow(2))), weight))
        return hidden.square().sum()

    exact = loss(functions.linear, functions.mean, functions.silu, functions.rsqrt)
    ordinary = loss(
        torch.nn.functional.linear, lambda y: y.mean(-1, keepdim=True), torch.nn.functional.silu, torch.rsqrt
    )
    ours, theirs = (torch.autograd.grad(each, (x, weight)) for each in (exact, ordinary))
    for found, expected in zip(ours, theirs, strict=True):
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_this_machine_is_accepted_and_one_that_rounds_by_neighbours_is_not(monkeypatch):
    refuse_other_arithmetic(CPU)
    monkeypatch.setattr(self_check, "exp", lambda x: x.exp() * (1 + 1e-7 * len(x)))
    with pytest.raises(ConfigError, match=r"not work on this machine.*depends on its place"):
        refuse_other_arithmetic(CPU)


def test_a_machine_whose_products_are_rounded_is_refused(monkeypatch):
    monkeypatch.setattr(self_check, "term_bits", lambda terms: (28, 28))
    with pytest.raises(ConfigError, match=r"product of integers below 2\^53 is not exact"):
        refuse_other_arithmetic(CPU)
