"""Attention of runs of queries to runs of keys by torch's kernels, with what they sum up to.

Softmax over the union of sets of keys comes from softmax over each (arXiv:2112.05682): with the logarithm
l_i of the sum of exponentials over set i and l = logaddexp of them, the output is the sum of
exp(l_i - l) * output_i. Backwards a set's probabilities are exp(score - l), and the kernels compute the
gradients from exactly that l and the whole output, as in ring attention (arXiv:2310.01889)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from learner.backends.shared.packed_attention import seen_keys
from learner.host_memory.copies import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class KeySets:
    """Runs of queries, each with its run of keys."""

    causal: bool
    """Says that the last query of a run sees all its keys, and each query before it one key less; else all
    see all."""
    query_sizes: tuple[int, ...]
    key_sizes: tuple[int, ...]
    cu_queries: Tensor
    """int32 [runs + 1], where each run's queries start."""
    cu_keys: Tensor
    """int32 [runs + 1], where each run's keys start."""

    def to(self, device: torch.device) -> "KeySets":
        return replace(
            self, cu_queries=to_device(self.cu_queries, device), cu_keys=to_device(self.cu_keys, device)
        )


def key_sets(query_sizes: Sequence[int], key_sizes: Sequence[int], *, causal: bool) -> KeySets:
    """Return runs of these sizes, which lie end to end."""
    return KeySets(
        causal=causal,
        query_sizes=tuple(query_sizes),
        key_sizes=tuple(key_sizes),
        cu_queries=_starts(query_sizes),
        cu_keys=_starts(key_sizes),
    )


def common(one: range, other: range) -> range:
    """Return the tokens that are in both."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _starts(sizes: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)


def attend(
    query: Tensor, key: Tensor, value: Tensor, sets: KeySets, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs [q, heads, d], and the logarithms of their softmax's sums, [q, heads].

    A query sees the last `window` of the keys that it would see without. On CUDA the logarithms are float32;
    on CPU they have the dtype in which the kernel computes."""
    if not query.is_cuda:
        found = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *run, 0.0, causal, attn_mask=mask, scale=scale
            )
            for run, (causal, mask) in zip(
                _by_run(sets, (query,), (key, value)), _seen(sets, window, query), strict=True
            )
        ]
        outputs, log_totals = zip(*found, strict=True)
        return _joined(outputs), torch.cat([each[0].t() for each in log_totals])
    output, log_total, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        sets.cu_queries,
        sets.cu_keys,
        max(sets.query_sizes),
        max(sets.key_sizes),
        0.0,
        sets.causal and window is None,
        False,
        scale=scale,
        **_sight(window),
    )
    return output, log_total.t().contiguous()


def differentiate(  # noqa: PLR0913 - those of torch's kernels
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_total: Tensor,
    sets: KeySets,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value through these sets, from that of the whole output.

    Args:
        grad: [q, heads, d], gradient of the output over all sets.
        query: [q, heads, d]; key and value: [k, groups, d].
        output: [q, heads, d], over all sets.
        log_total: [q, heads], over all sets.
        sets: those to differentiate through.
        window: as for `attend`."""
    if not query.is_cuda:
        return _differentiate_on_cpu(grad, query, key, value, output, log_total, sets, scale, window)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        output,
        log_total.t().contiguous(),
        sets.cu_queries,
        sets.cu_keys,
        max(sets.query_sizes),
        max(sets.key_sizes),
        0.0,
        sets.causal and window is None,
        no_dropout,
        torch.empty(0, device=query.device),
        scale=scale,
        **_sight(window),
    )
    return found


def _sight(window: int | None) -> dict[str, int]:
    """Return how many keys a query sees to the left and to the right of that in its place, as kernels for
    CUDA take it: for them a window is what makes attention causal, too."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _differentiate_on_cpu(  # noqa: PLR0913 - those of torch's kernels
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_total: Tensor,
    sets: KeySets,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    runs = _by_run(sets, (grad, query, output), (key, value))
    log_totals = [each.t()[None] for each in torch.split(log_total, list(sets.query_sizes))]
    found = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            of_output, q, k, v, out, total, 0.0, causal, attn_mask=mask, scale=scale
        )
        for (of_output, q, out, k, v), total, (causal, mask) in zip(
            runs, log_totals, _seen(sets, window, query), strict=True
        )
    ]
    of_query, of_key, of_value = zip(*found, strict=True)
    return _joined(of_query), _joined(of_key), _joined(of_value)


def _seen(sets: KeySets, window: int | None, like: Tensor) -> list[tuple[bool, Tensor | None]]:
    return [
        _seen_in_run(n, m, window, like) if sets.causal else (False, None)
        for n, m in zip(sets.query_sizes, sets.key_sizes, strict=True)
    ]


def _seen_in_run(queries: int, keys: int, window: int | None, like: Tensor) -> tuple[bool, Tensor | None]:
    if queries == keys and (window is None or window >= keys):
        return True, None
    seen = seen_keys(queries, keys, window, like.device)
    return False, torch.zeros(queries, keys, dtype=like.dtype).masked_fill_(~seen, -torch.inf)


def _by_run(sets: KeySets, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cut tensors [tokens, heads, d] into [1, heads, tokens, d] of each run, in the order of the tensors."""
    sizes = [sets.query_sizes] * len(of_queries) + [sets.key_sizes] * len(of_keys)
    by_tensor = [
        [run.transpose(0, 1)[None] for run in torch.split(tensor, list(size))]
        for tensor, size in zip((*of_queries, *of_keys), sizes, strict=True)
    ]
    return [list(run) for run in zip(*by_tensor, strict=True)]


def _joined(runs: Sequence[Tensor]) -> Tensor:
    return torch.cat([run[0].transpose(0, 1) for run in runs])
