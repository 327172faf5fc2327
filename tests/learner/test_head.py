import pytest
import torch

from learner.backends.megatron.model.output_layer import head_loss

ROWS, HIDDEN, VOCAB = 37, 16, 50
TEMPERATURE = 0.7


def made(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_()
    labels = torch.randint(VOCAB, (ROWS,), generator=generator)
    advantages = torch.randn(ROWS, generator=generator)

    def token_loss(logprobs, rows):
        ratio = torch.exp(logprobs + 4.0).clamp(max=2.0).detach()
        return -(ratio * advantages[rows] * logprobs).sum()

    return hidden, weight, labels, token_loss


@pytest.mark.parametrize("chunk_size", [1, 10, 1000])
def test_loss_and_gradients_are_those_of_plain_torch(chunk_size):
    hidden, weight, labels, token_loss = made()
    loss, logprobs, entropy = head_loss(
        hidden, weight, labels, token_loss, temperature=TEMPERATURE, chunk_size=chunk_size
    )
    found = torch.autograd.grad(3 * loss, (hidden, weight))
    distribution = torch.log_softmax(hidden @ weight.t() / TEMPERATURE, dim=-1)
    expected = distribution.gather(-1, labels[:, None])[:, 0]
    expected_loss = token_loss(expected, slice(None))
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-5)
    for ours, theirs in zip(found, torch.autograd.grad(3 * expected_loss, (hidden, weight)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5)
    assert torch.allclose(logprobs, expected, atol=1e-5)
    assert torch.allclose(entropy, -(distribution.exp() * distribution).sum(-1), atol=1e-5)
    assert not logprobs.requires_grad
    assert not entropy.requires_grad


def test_no_tokens_give_no_loss_and_zero_gradients():
    hidden, weight, labels, token_loss = made()
    loss, logprobs, _ = head_loss(hidden[:0], weight, labels[:0], token_loss, temperature=1.0, chunk_size=10)
    [gradient] = torch.autograd.grad(loss, weight)
    assert (loss.item(), len(logprobs), gradient.abs().max().item()) == (0.0, 0, 0.0)


def test_a_frozen_output_layer_gets_no_gradient():
    hidden, weight, labels, token_loss = made()
    loss, _, _ = head_loss(hidden, weight.detach(), labels, token_loss, temperature=1.0, chunk_size=10)
    [gradient] = torch.autograd.grad(loss, hidden)
    assert gradient.abs().max() > 0
