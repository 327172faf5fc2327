"""Attention of runs of queries to runs of keys with the logarithms of its sums, and the gradients of it.

Softmax over the union of sets of keys comes from softmax over each (arXiv:2112.05682): with the logarithm
l_i of the sum of exponentials over set i and l = logaddexp of them, the output is the sum of
exp(l_i - l) * output_i. Backwards a set's probabilities are exp(score - l), and the kernels compute the
gradients from exactly that l and the whole output, as in ring attention (arXiv:2310.01889).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from learner.publication.transfer import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class KeySets:
    """Runs of queries, each with its run of keys."""

    causal: bool
    """Says that a run's queries are its keys, of which each sees itself and those before it."""
    query_sizes: tuple[int, ...]
    key_sizes: tuple[int, ...]
    cu_queries: Tensor
    """int32 [runs + 1], where each run's queries start."""
    cu_keys: Tensor
    """int32 [runs + 1], where each run's keys start."""

    def to(self, device: torch.device) -> "KeySets":
        """Copy to `device`; a no-op when already there."""
        return replace(
            self,
            cu_queries=to_device(self.cu_queries, device),
            cu_keys=to_device(self.cu_keys, device),
        )


def key_sets(query_sizes: Sequence[int], key_sizes: Sequence[int], *, causal: bool) -> KeySets:
    """Make the sets of runs of these sizes, on the host."""
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


def attend(query: Tensor, key: Tensor, value: Tensor, sets: KeySets, scale: float) -> tuple[Tensor, Tensor]:
    """Return the outputs [q, heads, d], and the logarithms of their softmax's sums, [q, heads].

    The logarithms are float32, or float64 where the queries are. On CUDA queries have a dtype of 16 bits."""
    return (_attend_cuda if query.is_cuda else _attend_cpu)(query, key, value, sets, scale)


def differentiate(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_total: Tensor,
    sets: KeySets,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value through these sets, from that of the whole output.

    Args:
        grad: [q, heads, d], gradient of the output over all sets.
        query: [q, heads, d].
        key: [k, groups, d].
        value: [k, groups, d].
        output: [q, heads, d], over all sets.
        log_total: [q, heads], over all sets.
        sets: those to differentiate through.
        scale: factor of the scores."""
    compute = _differentiate_cuda if query.is_cuda else _differentiate_cpu
    return compute(grad, query, key, value, output, log_total, sets, scale)


def _attend_cuda(
    query: Tensor, key: Tensor, value: Tensor, sets: KeySets, scale: float
) -> tuple[Tensor, Tensor]:
    output, log_total, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        sets.cu_queries,
        sets.cu_keys,
        max(sets.query_sizes),
        max(sets.key_sizes),
        0.0,
        sets.causal,
        False,
        scale=scale,
    )
    return output, log_total.t().contiguous()


def _differentiate_cuda(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_total: Tensor,
    sets: KeySets,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
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
        sets.causal,
        no_dropout,
        torch.empty(0, device=query.device),
        scale=scale,
    )
    return found


def _attend_cpu(
    query: Tensor, key: Tensor, value: Tensor, sets: KeySets, scale: float
) -> tuple[Tensor, Tensor]:
    """Do what `_attend_cuda` does, run by run; the logarithms have the dtype in which the kernel computes."""
    found = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*run, 0.0, sets.causal, scale=scale)
        for run in zip(*_by_run(sets, (query,), (key, value)), strict=True)
    ]
    outputs, log_totals = zip(*found, strict=True)
    return _joined(outputs), torch.cat([each[0].t() for each in log_totals])


def _differentiate_cpu(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_total: Tensor,
    sets: KeySets,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `_differentiate_cuda` does, run by run."""
    grads, queries, outputs, keys, values = _by_run(sets, (grad, query, output), (key, value))
    log_totals = [each.t()[None] for each in torch.split(log_total, list(sets.query_sizes))]
    found = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *run, 0.0, sets.causal, scale=scale
        )
        for run in zip(grads, queries, keys, values, outputs, log_totals, strict=True)
    ]
    of_query, of_key, of_value = zip(*found, strict=True)
    return _joined(of_query), _joined(of_key), _joined(of_value)


def _by_run(sets: KeySets, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cut tensors [tokens, heads, d] into their runs, [1, heads, tokens, d] each."""
    sizes = [sets.query_sizes] * len(of_queries) + [sets.key_sizes] * len(of_keys)
    return [
        [run.transpose(0, 1)[None] for run in torch.split(tensor, list(size))]
        for tensor, size in zip((*of_queries, *of_keys), sizes, strict=True)
    ]


def _joined(runs: Sequence[Tensor]) -> Tensor:
    return torch.cat([run[0].transpose(0, 1) for run in runs])
