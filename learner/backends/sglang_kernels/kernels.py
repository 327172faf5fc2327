"""SGLang's own kernels, which compute here what its server computes in deterministic mode.

They are Triton's, so that the result for a row does not depend on how many rows there are. The learner's
environment must have the server's versions of SGLang, torch and Triton: others may compile other code. Only
this file knows SGLang's modules."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bus.errors import ConfigError

SPLIT_TOKENS = 256
"""Keys after which a decoding server begins another part of a sum (SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE)."""
WORKSPACE_BYTES = 256 * 2**20
"""Bytes that the parts of sums take at a time."""
MODULES = (
    "sglang.srt.batch_invariant_ops",
    "sglang.kernels.ops.attention.extend_attention",
    "sglang.kernels.ops.attention.decode_attention",
)
DEEPGEMM = "sglang.srt.layers.deep_gemm_wrapper"
"""Package with other kernels for products, whose sums differ. It imports the whole server and its models."""


@dataclass(frozen=True)
class Decoded:
    """Tokens of a pack that a server feeds one at a time, a part of them."""

    rows: Tensor
    """int64 [n], where they lie in the pack."""
    first_keys: Tensor
    """int64 [n], where the first token of the same sequence lies."""
    ends: Tensor
    """int32 [n + 1], sums of the numbers of keys that each and those before it see."""
    splits: Tensor
    """int32 [n], parts of each token's sum."""
    keys: int
    """Keys that they see, all together."""

    def key_rows(self) -> Tensor:
        """Return int64 [keys], where the keys of each lie, one token's after another's."""
        counts = self.ends.diff()
        behind = (self.ends[:-1] - self.first_keys).repeat_interleave(counts, output_size=self.keys)
        return torch.arange(self.keys, device=self.rows.device) - behind


@dataclass(frozen=True)
class SglangKernels:
    """The functions whose sums have an order of their own. All else is single numbers."""

    matmul: Callable[[Tensor, Tensor], Tensor]
    """Product of [m, k] and [k, n], both bfloat16."""
    mean: Callable[[Tensor], Tensor]
    """Means along the last dimension of float32 [..., n], [..., 1]."""
    log_softmax: Callable[[Tensor], Tensor]
    """Log-probabilities of float32 logits [n, V]."""
    prefill: Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]
    """Causal attention of queries [T, heads, d] to keys and values [T, groups, d], from the starts of
    sequences int32 [sequences + 1], the length of the longest and the scale."""
    decode: Callable[[Tensor, Tensor, Tensor, Decoded, int, float], Tensor]
    """The same for some tokens: [n, heads, d] of the whole pack's queries, keys and values, the length of the
    longest sequence and the scale."""


@cache
def load_kernels() -> SglangKernels:
    """Import SGLang's kernels. Raises `ConfigError` where they cannot run, are missing or are others."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "model.numerics=sglang computes with SGLang's kernels, which need a GPU, and torch finds none: "
            "start the learner on a host with GPUs, or set model.numerics=fast"
        )
    try:
        with _without_deepgemm():
            products, prefilling, decoding = (importlib.import_module(name) for name in MODULES)
        return from_modules(products, prefilling, decoding)
    except (ImportError, AttributeError, ValueError) as error:  # the last where transformers is another
        raise ConfigError(
            f"model.numerics=sglang computes with SGLang's kernels, which the learner's environment does not "
            f"have ({error}): install the server's version of SGLang (0.5.17 or later) there, or set "
            "model.numerics=fast"
        ) from error


@contextmanager
def _without_deepgemm() -> Iterator[None]:
    """While inside, have modules that look for DeepGEMM find that there is none."""
    absent, says_so = ModuleType(DEEPGEMM), ModuleType(f"{DEEPGEMM}.configurer")
    says_so.ENABLE_JIT_DEEPGEMM = False  # type: ignore[attr-defined]
    stand_ins = {module.__name__: module for module in (absent, says_so)}
    replaced = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(replaced)


def from_modules(products: Any, prefilling: Any, decoding: Any) -> SglangKernels:
    """Return the kernels that SGLang's modules have."""
    extend, decode = prefilling.extend_attention_fwd_unified, decoding.decode_attention_fwd

    def prefill(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float
    ) -> Tensor:
        attended = torch.empty_like(query)
        everything = torch.arange(len(query), device=query.device)
        no_prefix = torch.zeros(len(starts) - 1, dtype=torch.int32, device=query.device)
        extend(
            query, attended, key, value, 1.0, 1.0, starts.long(), starts, everything, no_prefix, longest,
            sm_scale=scale, is_causal=True,
        )  # fmt: skip
        return attended

    def decoded(
        query: Tensor, key: Tensor, value: Tensor, tokens: Decoded, longest: int, scale: float
    ) -> Tensor:
        asking = query[tokens.rows]
        attended = torch.empty_like(asking)
        most = most_splits(longest)
        parts = asking.new_empty((*asking.shape[:2], most, value.shape[-1]), dtype=torch.float32)
        totals = asking.new_empty((*asking.shape[:2], most), dtype=torch.float32)
        decode(
            asking, key, value, attended, tokens.ends, tokens.key_rows(), parts, totals, tokens.splits, most,
            scale, 1.0, 1.0,
        )  # fmt: skip
        return attended

    return SglangKernels(
        matmul=lambda a, b: products.matmul_persistent(a, b) if len(a) else a @ b,  # no kernel takes nothing
        mean=lambda x: products.mean_dim(x, -1, keepdim=True),
        log_softmax=lambda logits: products.log_softmax(logits) if len(logits) else logits,
        prefill=prefill,
        decode=decoded,
    )


def most_splits(longest: int) -> int:
    """Return a power of two of parts, which the longest sequence needs at most: few kernels are compiled."""
    return 1 << (-(-longest // SPLIT_TOKENS) - 1).bit_length()


def decoded_tokens(sampled_next: Tensor, positions: Tensor, longest: int, width: int) -> list[Decoded]:
    """Return the tokens that the server has fed one at a time, in parts that fit `WORKSPACE_BYTES`.

    They are those that were sampled. The last of an answer is one of them: a server that schedules ahead has
    begun its next step by the time it sees that the answer has ended, and caches what came of it.

    Args:
        sampled_next: bool [T], whether the next token of the same sequence was sampled.
        positions: int64 [T], from 0 in each sequence.
        longest: tokens of the longest sequence.
        width: numbers that attention computes for each token."""
    sampled = torch.cat((sampled_next.new_zeros(1), sampled_next[:-1])) & (positions > 0)
    rows = sampled.nonzero()[:, 0]
    at_a_time = max(1, WORKSPACE_BYTES // (4 * width * most_splits(longest)))
    return [_decoded(some, positions) for some in torch.split(rows, at_a_time)] if len(rows) else []


def _decoded(rows: Tensor, positions: Tensor) -> Decoded:
    counts = positions[rows] + 1
    ends = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    splits = (counts + (SPLIT_TOKENS - 1)) // SPLIT_TOKENS
    return Decoded(rows, rows - positions[rows], ends.int(), splits.int(), int(ends[-1]))
