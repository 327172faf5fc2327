"""Torch's own functions in place of SGLang's kernels, which run on GPUs only."""

import torch
import torch.nn.functional as F

from learner.backends.sglang_kernels.kernels import SglangKernels


def plain_kernels():
    return SglangKernels(
        matmul=lambda a, b: (a.float() @ b.float()).to(a.dtype),
        mean=lambda x: x.mean(-1, keepdim=True),
        log_softmax=lambda x: x.log_softmax(-1),
        prefill=prefill,
        decode=decode,
    )


def prefill(query, key, value, starts, longest, scale):
    found = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        assert end - begin <= longest
        q, k, v = (x[begin:end].transpose(0, 1)[None].float() for x in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        found.append(attended[0].transpose(0, 1))
    return torch.cat(found).to(query.dtype)


def decode(query, key, value, tokens, longest, scale):
    found, rows = [], tokens.key_rows().split(tokens.ends.diff().tolist())
    for row, seen in zip(tokens.rows.tolist(), rows, strict=True):
        assert seen[-1] == row, "a token sees itself last"
        assert len(seen) <= longest
        q, k, v = (x.transpose(0, 1)[None].float() for x in (query[row : row + 1], key[seen], value[seen]))
        attended = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
        found.append(attended[0].transpose(0, 1))
    return torch.cat(found).to(query.dtype)
