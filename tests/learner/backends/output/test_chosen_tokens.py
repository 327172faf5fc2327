"""Log-probs of a teacher's likeliest tokens, their divergence and gradients, against float64 and by hand."""

import math
from itertools import pairwise

import pytest
import torch

from learner.algorithms.losses.kl import DIRECTIONS, top_k_kl
from learner.backends.output.chosen_tokens import label_and_chosen_logprobs, top_tokens
from learner.backends.output.output_layer import kept_columns

ROWS, HIDDEN, VOCAB = 23, 16, 50
TEMPERATURES = torch.linspace(0.5, 1.5, ROWS)


def made(seed: int, scale: float = 1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(ROWS, HIDDEN, generator=generator)).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (ROWS,), generator=generator)


def teacher_of(count: int, scale: float = 1.0, chunk_size: int = 7):
    hidden, weight, _ = made(1, scale)
    with torch.no_grad():
        return top_tokens(
            hidden, lambda rows: rows @ weight.t(), count, temperatures=TEMPERATURES, first=0,
            chunk_size=chunk_size,
        )  # fmt: skip


def policy_logprobs(hidden, weight, labels, ids, chunk_size: int = 7, kept=None):
    return label_and_chosen_logprobs(
        hidden, lambda rows: rows @ weight.t(), labels, kept_columns(ids, 0), kept=kept,
        temperatures=TEMPERATURES, chunk_size=chunk_size,
    )  # fmt: skip


def in_float64(hidden, weight):
    logits = hidden @ weight.t()  # rounded as ours are: large ones are known to 1e-5 nats or so
    return torch.log_softmax(logits.double() / TEMPERATURES.double()[:, None], -1)


def divergence_in_float64(policy, teacher, count: int, direction: str):
    """Of whole log-probs [N, V], with the others added up one by one."""
    order = teacher.argsort(descending=True)
    parts = []
    for each in (policy, teacher):
        ordered = each.gather(-1, order)
        top, others = ordered[:, :count], ordered[:, count:]
        parts.append(torch.cat((top, others.logsumexp(-1, keepdim=True)), -1) if count < VOCAB else top)
    p, q = parts if direction == "reverse" else parts[::-1]
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("scale", [0.3, 3.0])  # with 3 the rest of some rows has a mass below 1e-7
@pytest.mark.parametrize(("count", "chunk_size"), [(1, 7), (8, 1), (8, 1000), (VOCAB, 7), (VOCAB + 9, 7)])
def test_divergence_and_gradients_are_those_of_float64(count, chunk_size, scale, direction):
    hidden, weight, labels = made(0, scale)
    top = teacher_of(count, scale)
    _, _, logprobs = policy_logprobs(hidden, weight, labels, top.token_ids, chunk_size)
    kl = top_k_kl(logprobs, top.logprobs, direction=direction)
    with torch.no_grad():
        theirs = in_float64(*made(1, scale)[:2])
    expected = divergence_in_float64(in_float64(hidden, weight), theirs, count, direction)
    assert torch.allclose(kl.double(), expected, rtol=1e-5, atol=1e-5)
    slopes = torch.linspace(-1, 2, ROWS)
    found = torch.autograd.grad((kl * slopes).sum(), (hidden, weight))
    for ours, right in zip(
        found, torch.autograd.grad((expected * slopes).sum(), (hidden, weight)), strict=True
    ):
        bound = 2e-6 if scale < 1 else 1e-4  # float32 log-probs of -100 nats are known to 1e-5
        assert (ours - right).abs().max() <= bound * right.abs().max() + 1e-6


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_whole_vocabulary_gives_the_whole_divergence_and_fewer_tokens_less(direction):
    hidden, weight, labels = made(0)
    p, q = in_float64(hidden, weight), in_float64(*made(1)[:2])
    whole = (
        (p if direction == "reverse" else q).exp() * ((p - q) if direction == "reverse" else (q - p))
    ).sum(-1)
    found = []
    for count in (1, 4, 16, VOCAB):
        top = teacher_of(count)
        _, _, logprobs = policy_logprobs(hidden, weight, labels, top.token_ids)
        found.append(top_k_kl(logprobs, top.logprobs, direction=direction))
    assert torch.allclose(found[-1].double(), whole, rtol=1e-5)
    assert all((less <= more + 1e-5).all() for less, more in pairwise(found))
    assert all((each > 0).all() for each in found[1:])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_policy_that_is_its_teacher_has_no_divergence_and_no_gradient(direction):
    hidden, weight, labels = made(1)
    top = teacher_of(6)
    _, _, logprobs = policy_logprobs(hidden, weight, labels, top.token_ids)
    kl = top_k_kl(logprobs, top.logprobs, direction=direction)
    assert kl.abs().max() < 1e-6
    [gradient] = torch.autograd.grad(kl.sum(), hidden)
    assert gradient.abs().max() < 1e-5


def test_a_small_vocabulary_by_hand():
    policy = torch.tensor([[0.5, 0.2, 0.3]]).log()  # of tokens 2 and 0, and of 1 and 3 together
    teacher = torch.tensor([[0.6, 0.3, 0.1]]).log()
    reverse = 0.5 * math.log(0.5 / 0.6) + 0.2 * math.log(0.2 / 0.3) + 0.3 * math.log(0.3 / 0.1)
    forward = 0.6 * math.log(0.6 / 0.5) + 0.3 * math.log(0.3 / 0.2) + 0.1 * math.log(0.1 / 0.3)
    assert top_k_kl(policy, teacher, direction="reverse").item() == pytest.approx(reverse, abs=1e-7)
    assert top_k_kl(policy, teacher, direction="forward").item() == pytest.approx(forward, abs=1e-7)
    logits = torch.tensor([[0.2, 0.1, 0.5, 0.2]]).log()  # one row, the identity for a hidden state
    ones = torch.ones(1)
    _, _, found = label_and_chosen_logprobs(
        logits, lambda rows: rows, torch.tensor([3]), kept_columns(torch.tensor([[2, 0]]), 0),
        temperatures=ones, chunk_size=10,
    )  # fmt: skip
    assert torch.allclose(found, policy, atol=1e-6)
    top = top_tokens(logits, lambda rows: rows, 1, temperatures=ones, first=0, chunk_size=10)
    assert top.token_ids.tolist() == [[2]]
    assert torch.allclose(top.logprobs.exp(), torch.tensor([[0.5, 0.5]]))


def test_rows_that_are_not_taught_have_no_divergence_and_kept_sets_change_none():
    hidden, weight, labels = made(0)
    top = teacher_of(5)
    ids, logprobs = top.token_ids.clone(), top.logprobs.clone()
    ids[::2], logprobs[::2] = -1, -torch.inf
    kept = kept_columns(torch.stack((labels, (labels + 1) % VOCAB), dim=-1), 0)
    results = []
    for sets in (None, kept):
        _, _, ours = policy_logprobs(hidden, weight, labels, ids, kept=sets)
        kl = top_k_kl(ours, logprobs, direction="reverse")
        results.append((kl, torch.autograd.grad(kl.sum(), hidden)[0]))
    (kl, gradient), (within_sets, other_gradient) = results
    assert kl[::2].abs().max() == gradient[::2].abs().max() == 0
    assert kl[1::2].min() > 0
    assert torch.equal(kl, within_sets)
    assert torch.equal(gradient, other_gradient)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_logits_that_are_far_apart_leave_all_finite(direction):
    hidden, weight, labels = made(0, 1e4)
    top = teacher_of(5, 1e4)
    _, _, logprobs = policy_logprobs(hidden, weight, labels, top.token_ids)
    kl = top_k_kl(logprobs, top.logprobs, direction=direction)
    assert torch.isfinite(kl).all()
    assert all(torch.isfinite(each).all() for each in torch.autograd.grad(kl.sum(), (hidden, weight)))
