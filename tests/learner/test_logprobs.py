import pytest
import torch

from learner.backends.megatron.model.logprobs import label_logprobs


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_logprobs_and_gradients_equal_log_softmax_whatever_the_chunks(chunk_size):
    torch.manual_seed(0)
    hidden = torch.randn(9, 5, requires_grad=True)
    weight = torch.randn(7, 5, requires_grad=True)
    labels = torch.randint(0, 7, (9,))
    logprobs, entropy = label_logprobs(
        hidden, lambda rows: rows @ weight.T, labels, temperature=1.3, chunk_size=chunk_size
    )
    distribution = torch.log_softmax(hidden @ weight.T / 1.3, dim=-1)
    expected = distribution.gather(-1, labels[:, None])[:, 0]
    assert torch.allclose(logprobs, expected, atol=1e-6)
    assert torch.allclose(entropy, -(distribution.exp() * distribution).sum(-1), atol=1e-6)
    assert not entropy.requires_grad

    upstream = torch.randn(9)
    ours = torch.autograd.grad(logprobs, (hidden, weight), upstream)
    theirs = torch.autograd.grad(expected, (hidden, weight), upstream)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def test_huge_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 0.0], [-1e4, 1e4]])
    logprobs, entropy = label_logprobs(
        logits, lambda rows: rows, torch.tensor([0, 0]), temperature=1.0, chunk_size=2
    )
    assert logprobs.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]


def test_no_labels_give_no_logprobs():
    logprobs, entropy = label_logprobs(
        torch.zeros(0, 3), lambda rows: rows, torch.zeros(0, dtype=torch.int64), temperature=1.0, chunk_size=8
    )
    assert logprobs.shape == entropy.shape == (0,)


def test_logits_in_bfloat16_are_normalized_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(4, 1000).bfloat16()
    labels = torch.randint(0, 1000, (4,))
    logprobs, _ = label_logprobs(logits, lambda rows: rows, labels, temperature=1.0, chunk_size=8)
    expected = torch.log_softmax(logits.float(), -1).gather(-1, labels[:, None])[:, 0]
    assert torch.allclose(logprobs, expected, atol=1e-5)
