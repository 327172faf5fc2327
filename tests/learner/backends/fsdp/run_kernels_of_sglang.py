"""Runs SGLang's kernels in Triton's interpreter, in SGLang's own environment, and prints how far they are
from torch's functions; and whether the learner's norms and rotations are SGLang's to the bit.

The interpreter has no bfloat16, and the kernels for products and means want a GPU."""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[4]))

from types import SimpleNamespace

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

from learner.backends.sglang_kernels.functions import normed, rotary_angles, rotated
from learner.backends.sglang_kernels.kernels import decoded_tokens, load_kernels
from tests.learner.plain_kernels import plain_kernels

ours, plain = load_kernels(), plain_kernels()
torch.manual_seed(0)
LENGTHS = [270, 5, 33]
starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
positions = torch.cat([torch.arange(each) for each in LENGTHS])
sampled_next = torch.zeros(sum(LENGTHS), dtype=torch.bool)
for begin, end in ((2, 6), (252, 269), (271, 274), (280, 300)):
    sampled_next[begin:end] = True
query, key, value = (torch.randn(sum(LENGTHS), heads, 16).half() for heads in (4, 2, 2))
[tokens] = decoded_tokens(sampled_next, positions, longest=270, width=64)
logits = torch.randn(3, 2000)
found = {
    name: (getattr(ours, name)(*given).float() - getattr(plain, name)(*given).float()).abs().max().item()
    for name, given in {
        "log_softmax": (logits,),
        "prefill": (query, key, value, starts, 270, 0.25),
        "decode": (query, key, value, tokens, 270, 0.25),
    }.items()
}


def of_server(x, residual=None, **settings):
    """The norm as the server computes it for training, without a server around it."""
    shared = {"hidden_size": x.shape[-1], "variance_size_override": None, "variance_epsilon": 1e-6}
    given = {"override_orig_dtype": None, "fp32_residual": False, **shared, **settings}
    return RMSNorm.forward_native(SimpleNamespace(cast_x_before_out_mul=True, **given), x, residual)


wide = {"override_orig_dtype": torch.float32, "fp32_residual": True}
residual, delta, of_heads = torch.randn(9, 64), torch.randn(9, 64).bfloat16(), torch.randn(36, 16).bfloat16()
weight, small = torch.randn(64).bfloat16(), torch.randn(16).bfloat16()
normal, behind = of_server(delta, residual, weight=weight.float(), **wide)
places = torch.arange(9)
turned = normed(plain, of_heads.view(9, 4, 16), small, 1e-6)
angles = torch.outer(places.float(), 1.0 / (1000000 ** (torch.arange(0, 16, 2).float() / 16)))
server_turned = apply_rotary_emb(turned, angles.cos(), angles.sin(), is_neox_style=True)
found["bits"] = {
    "residual": torch.equal(behind, residual + delta.float()),
    "norm": torch.equal(normal, normed(plain, behind, weight, 1e-6)),
    "norm_of_heads": torch.equal(of_server(of_heads, weight=small.float()).view(9, 4, 16), turned),
    "rotation": torch.equal(server_turned, rotated(turned, rotary_angles(1e6, 16, places))),
}
sys.stdout.write(json.dumps({"decoded": len(tokens.rows), **found}))
