"""Learner and actors divide rows by the same lengths (arXiv:2402.09353)."""

import pytest
import torch

from actors.weights.received import merged_weights, torch_tensors
from learner.backends.shared.lora import excess, row_norms, squared_norms
from learner.host_memory.copies import host_tensors
from storage.model_files.adapter_names import adapter_names, magnitude_name
from storage.weights.tensors import Weights

SCALE = 2.0


def rows_of_both(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by what the learner and an actor multiply the rows of W + scale * B A, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"weight": (48, 160), "a": (8, 160), "b": (48, 8)}
    weight, a, b = (torch.randn(size, generator=generator).bfloat16() for size in sizes.values())
    change = 0.1 * torch.randn(48, generator=generator)
    on_device = (each.to(device) for each in (weight, a, b))
    learner = 1 + excess(squared_norms(*on_device, SCALE), change.to(device)).cpu()
    names = (*adapter_names("layer.weight"), magnitude_name("layer.weight"))
    adapters = dict(zip(names, (a, b, row_norms(weight) + change), strict=True))
    base = Weights.of(0, host_tensors({"layer.weight": weight.float()}))
    merged = torch_tensors(merged_weights(base, Weights.of(1, host_tensors(adapters)), SCALE).tensors)
    together = weight.float() + SCALE * b.float() @ a.float()
    return learner, (merged["layer.weight"] / together).median(dim=1).values


def test_row_lengths_of_bfloat16_weights_are_those_of_actors():
    learner, actor = rows_of_both("cpu")
    assert torch.allclose(learner, actor, rtol=2e-6, atol=0)


@pytest.mark.gpu
def test_row_lengths_of_bfloat16_weights_on_a_gpu_are_those_of_actors():
    learner, actor = rows_of_both("cuda")
    assert torch.allclose(learner, actor, rtol=2e-6, atol=0)
