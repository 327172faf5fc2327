"""Runs SGLang's kernels in Triton's interpreter, in SGLang's own environment, and prints how far they are
from torch's functions.

The interpreter has no bfloat16, and the kernels for products and means want a GPU."""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[4]))

import torch

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
sys.stdout.write(json.dumps({"decoded": len(tokens.rows), **found}))
