"""What stands between the products of a gated layer on a CPU: its numbers, and what it keeps for the backward
pass."""

import pytest
import torch
import torch.nn.functional as F

from learner.backends.megatron.core.megatron_core import fused_bias_swiglu
from learner.data.packing import pack
from tests.learner.backends.model.built import built_from
from tests.learner.tiny import random_samples, tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a kernel")


def gradients(layer, *inputs):
    leaves = [each.clone().requires_grad_() for each in inputs]
    output = layer(*leaves)
    return output, *torch.autograd.grad(output.float().square().sum(), leaves)


def in_plain_torch(gate_and_up, weights=None):
    gate, up = gate_and_up.chunk(2, -1)
    product = F.silu(gate) * up
    return product if weights is None else (product * weights).to(product.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_layer_and_its_gradient_are_to_the_bit_those_of_plain_torch(dtype):
    gate_and_up, weights = 3 * torch.randn(61, 2 * 333), torch.rand(61, 1)
    ours = gradients(lambda x: fused_bias_swiglu.bias_swiglu_impl(x, None), gate_and_up.to(dtype))
    for one, other in zip(ours, gradients(in_plain_torch, gate_and_up.to(dtype)), strict=True):
        assert torch.equal(one, other)
    ours = gradients(
        lambda x, w: fused_bias_swiglu.weighted_bias_swiglu_impl(x, None, w), gate_and_up.to(dtype), weights
    )
    for one, other in zip(ours, gradients(in_plain_torch, gate_and_up.to(dtype), weights), strict=True):
        assert torch.equal(one, other)


def test_a_gated_layer_keeps_its_halves_and_their_product_alone():
    model = tiny_model("llama")
    [batch] = pack(random_samples([5, 17]), 1000)
    trained, width, kept = built_from(model), model.config.intermediate_size, []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        trained.logits(batch)
    layers, tokens = model.config.num_hidden_layers, len(batch.tokens)
    of_layers = [shape for shape in kept if shape[0] == tokens and shape[-1] in (width, 2 * width)]
    assert sorted(shape[-1] for shape in of_layers) == [width] * layers + [2 * width] * layers
