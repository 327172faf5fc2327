"""The fused loss and the log-probabilities against plain torch on whole logits."""

from itertools import accumulate

import pytest
import torch

from learner.backends.output.output_layer import (
    _sums_of_block,
    kept_columns,
    label_logprobs,
    output_layer_loss,
    softmax_sums,
)

ROWS, HIDDEN, VOCAB = 37, 16, 50
TEMPERATURES = torch.linspace(0.5, 1.5, ROWS)
ENTROPY_COEF = 0.3


def made(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_()
    labels = torch.randint(VOCAB, (ROWS,), generator=generator)
    advantages = torch.randn(ROWS, generator=generator)

    def token_loss(logprobs, entropy, rows):
        ratio = torch.exp(logprobs + 4.0).clamp(max=2.0).detach()
        return -(ratio * advantages[rows] * logprobs).sum()

    return hidden, weight, labels, token_loss


def with_entropy_bonus(token_loss):
    return lambda logprobs, entropy, rows: (
        token_loss(logprobs, entropy, rows) - ENTROPY_COEF * entropy.square().sum()
    )


def in_plain_torch(hidden, weight, labels, cap=None):
    """Log-probabilities of the labels and entropies, each at its own temperature."""
    logits = hidden @ weight.t()
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    distribution = torch.log_softmax(logits / TEMPERATURES[:, None], dim=-1)
    return distribution.gather(-1, labels[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


@pytest.mark.parametrize(("rows", "vocab"), [(1, 70_001), (9, 1 << 20), (37, 70_001)])
def test_sums_that_are_taken_block_by_block_are_to_the_bit_those_of_all_rows_at_once(rows, vocab):
    logits, scale = 4 * torch.randn(rows, vocab), torch.rand(rows) + 0.5
    for ours, whole in zip(softmax_sums(logits, scale), _sums_of_block(logits, scale), strict=True):
        assert torch.equal(ours, whole)


def most_bytes(work):
    """Return the most memory that torch has had at a time beyond what there was before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        work()
    events = (event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes))


def test_a_chunk_of_logits_is_nearly_all_that_the_fused_loss_takes():
    rows, vocab, chunk_size = 640, 30_000, 256
    hidden, weight = (torch.randn(size, 4, requires_grad=True) for size in (rows, vocab))
    taken = most_bytes(
        lambda: output_layer_loss(
            hidden, weight, torch.zeros(rows, dtype=torch.int64), lambda logprobs, *_: -logprobs.sum(),
            temperatures=torch.ones(rows), chunk_size=chunk_size,
        )
    )  # fmt: skip
    of_chunk = 4 * chunk_size * vocab
    assert of_chunk < taken < 2 * of_chunk


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 10, 1000])
def test_fused_loss_and_gradients_are_those_of_plain_torch(chunk_size, bonus, cap):
    hidden, weight, labels, token_loss = made()
    loss_of = with_entropy_bonus(token_loss) if bonus else token_loss
    loss, logprobs, entropy = output_layer_loss(
        hidden, weight, labels, loss_of, temperatures=TEMPERATURES, chunk_size=chunk_size, cap=cap
    )
    found = torch.autograd.grad(3 * loss, (hidden, weight))
    expected = in_plain_torch(hidden, weight, labels, cap)
    expected_loss = loss_of(*expected, slice(None))
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    for ours, theirs in zip(found, torch.autograd.grad(3 * expected_loss, (hidden, weight)), strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5, rtol=1e-5)
    assert torch.allclose(logprobs, expected[0], atol=1e-5)
    assert torch.allclose(entropy, expected[1], atol=1e-5)
    assert not logprobs.requires_grad
    assert not entropy.requires_grad


def test_no_tokens_give_no_loss_and_zero_gradients():
    hidden, weight, labels, token_loss = made()
    loss, logprobs, _ = output_layer_loss(
        hidden[:0], weight, labels[:0], token_loss, temperatures=TEMPERATURES[:0], chunk_size=10
    )
    [gradient] = torch.autograd.grad(loss, weight)
    assert (loss.item(), len(logprobs), gradient.abs().max().item()) == (0.0, 0, 0.0)


def test_a_frozen_output_layer_gets_no_gradient():
    hidden, weight, labels, token_loss = made()
    loss, _, _ = output_layer_loss(
        hidden, weight.detach(), labels, token_loss, temperatures=TEMPERATURES, chunk_size=10
    )
    [gradient] = torch.autograd.grad(loss, hidden)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("used", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("chunk_size", [1, 10, 1000])
def test_logprobs_and_entropy_carry_the_gradient_of_plain_torch_whatever_the_chunks(chunk_size, used):
    hidden, weight, labels, _ = made()
    found = label_logprobs(
        hidden, lambda rows: rows @ weight.t(), labels, temperatures=TEMPERATURES, chunk_size=chunk_size
    )
    expected = in_plain_torch(hidden, weight, labels)
    upstream = [torch.randn(ROWS) if each else None for each in used]

    def gradients(values):
        total = sum(
            (value * slope).sum() for value, slope in zip(values, upstream, strict=True) if slope is not None
        )
        return torch.autograd.grad(total, (hidden, weight))

    for ours, theirs in zip((*found, *gradients(found)), (*expected, *gradients(expected)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def kept_sets(labels):
    """A set of up to 6 tokens for most rows, its label among them; none for every third."""
    generator = torch.Generator().manual_seed(1)
    sets = torch.full((ROWS, 6), -1)
    for row in range(ROWS):
        if row % 3:
            others = [n for n in torch.randperm(VOCAB, generator=generator).tolist() if n != labels[row]]
            size = 1 + row % 6
            sets[row, :size] = torch.tensor(sorted([labels[row].item(), *others[: size - 1]]))
    return sets


def within_sets(hidden, weight, labels, sets):
    """Log-probabilities within the kept sets, in float64, and entropies of all tokens."""
    logits = hidden.double() @ weight.double().t() / TEMPERATURES.double()[:, None]
    kept = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in enumerate(sets.tolist()):
        kept[row, [n for n in ids if n >= 0] if max(ids) >= 0 else slice(None)] = True
    distribution = torch.log_softmax(logits, -1)
    normaliser = logits.masked_fill(~kept, -torch.inf).logsumexp(-1)
    return (
        logits.gather(-1, labels[:, None])[:, 0] - normaliser,
        -(distribution.exp() * distribution).sum(-1),
    )


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 10, 1000])
def test_log_probs_within_kept_sets_and_their_gradients_are_those_of_float64(chunk_size, bonus):
    hidden, weight, labels, token_loss = made()
    loss_of = with_entropy_bonus(token_loss) if bonus else token_loss
    sets = kept_sets(labels)
    settings = {"temperatures": TEMPERATURES, "kept": kept_columns(sets.int(), 0), "chunk_size": chunk_size}
    loss, logprobs, entropy = output_layer_loss(hidden, weight, labels, loss_of, **settings)
    found = torch.autograd.grad(loss, (hidden, weight))
    expected = within_sets(hidden, weight, labels, sets)
    expected_loss = loss_of(*expected, slice(None))
    wanted = torch.autograd.grad(expected_loss, (hidden, weight))
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    for ours, theirs in zip((logprobs, entropy, *found), (*expected, *wanted), strict=True):
        assert torch.allclose(ours.double(), theirs.double(), atol=2e-5, rtol=1e-5)
    again = label_logprobs(hidden, lambda rows: rows @ weight.t(), labels, **settings)
    assert torch.equal(again[0].detach(), logprobs)
    second = torch.autograd.grad(loss_of(*again, slice(None)), (hidden, weight))
    for ours, theirs in zip(second, wanted, strict=True):
        assert torch.allclose(ours.double(), theirs.double(), atol=2e-5, rtol=1e-5)


def test_a_kept_set_of_the_label_alone_has_no_gradient_and_one_of_all_tokens_is_the_softmax():
    hidden, weight, labels, token_loss = made()
    alone = kept_columns(labels[:, None].int(), 0)
    loss, logprobs, _ = output_layer_loss(
        hidden, weight, labels, token_loss, temperatures=TEMPERATURES, kept=alone, chunk_size=10
    )
    assert logprobs.abs().max() == 0
    assert all(g.abs().max() == 0 for g in torch.autograd.grad(loss, (hidden, weight)))
    everything = kept_columns(torch.arange(VOCAB).expand(ROWS, -1).int(), 0)
    whole, of_all = (
        output_layer_loss(
            hidden, weight, labels, token_loss, temperatures=TEMPERATURES, kept=kept, chunk_size=10
        )
        for kept in (None, everything)
    )
    assert torch.allclose(whole[1], of_all[1], atol=1e-6)


def test_huge_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 0.0], [-1e4, 1e4]], requires_grad=True)
    logprobs, entropy = label_logprobs(
        logits, lambda rows: rows, torch.tensor([0, 0]), temperatures=torch.ones(2), chunk_size=2
    )
    assert logprobs.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]
    [gradient] = torch.autograd.grad(logprobs.sum() + entropy.sum(), logits)
    assert gradient.tolist() == [[0.0, 0.0], [1.0, -1.0]]


def test_no_labels_give_no_logprobs():
    logprobs, entropy = label_logprobs(
        torch.zeros(0, 3), lambda rows: rows, torch.zeros(0, dtype=torch.int64),
        temperatures=torch.ones(0), chunk_size=8,
    )  # fmt: skip
    assert logprobs.shape == entropy.shape == (0,)


def test_logits_in_bfloat16_are_normalized_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(4, 1000).bfloat16()
    labels = torch.randint(0, 1000, (4,))
    logprobs, _ = label_logprobs(logits, lambda rows: rows, labels, temperatures=torch.ones(4), chunk_size=8)
    expected = torch.log_softmax(logits.float(), -1).gather(-1, labels[:, None])[:, 0]
    assert torch.allclose(logprobs, expected, atol=1e-5)
