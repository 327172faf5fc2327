"""Router replay in transformers: samples that name experts, and routers that send tokens there."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from learner.data.packing import Sample

_LAYER = re.compile(r"layers\.(\d+)\.")


def given(samples: list[Sample], model: PreTrainedModel, seed: int = 0) -> list[Sample]:
    """Samples whose tokens are to go to experts drawn by chance; the second sample names none."""
    config, rng = model.config, np.random.default_rng(seed)
    count = getattr(config, "num_experts", None) or config.num_local_experts
    return [
        replace(
            sample,
            experts=rng.random((len(sample.token_ids) - 1, config.num_hidden_layers, count))
            .argsort(-1)[..., : config.num_experts_per_tok]
            .astype(np.uint8),
        )
        if i != 1
        else sample
        for i, sample in enumerate(samples)
    ]


def _routers(model: PreTrainedModel) -> list[tuple[int, torch.nn.Module]]:
    """Each with the number of its layer."""
    return [
        (int(_LAYER.search(name)[1]), module)
        for name, module in model.named_modules()
        if type(module).__name__.lower().endswith("topkrouter")
    ]


def _weights(router: torch.nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """What the experts of a token weigh, from the papers of the families."""
    family = type(router).__name__.lower()
    if family.startswith("gptoss"):
        return F.softmax(logits.gather(1, experts), -1)
    by_sigmoids = family.startswith(("glm", "deepseek", "lfm"))
    scores = (logits.sigmoid() if by_sigmoids else F.softmax(logits.float(), -1)).gather(1, experts)
    if getattr(router, "norm_topk_prob", True):
        scores = scores / scores.sum(-1, keepdim=True)
    return getattr(router, "routed_scaling_factor", 1.0) * scores


@contextmanager
def sent_to(model: PreTrainedModel, samples: list[Sample]) -> Iterator[None]:
    """Have transformers send the tokens of the samples, each of which is a row, where the samples say."""

    def hook(number):
        def send(router, inputs, outputs):
            logits, _, chosen = outputs
            experts = chosen.clone()
            rows = experts.view(len(samples), -1, experts.shape[-1])
            for row, sample in zip(rows, samples, strict=True):
                if sample.experts is not None:
                    named = torch.from_numpy(sample.experts[:, number].astype(np.int64))
                    row[: len(named)] = named
            return logits, _weights(router, logits, experts), experts

        return send

    handles = [router.register_forward_hook(hook(number)) for number, router in _routers(model)]
    yield
    for handle in handles:
        handle.remove()


@torch.no_grad()
def chosen_experts(model: PreTrainedModel, tokens: list[int], *, dense: int = 0) -> Tensor:
    """Where transformers sends the tokens of a sequence, [L, layers, k]; `dense` in dense layers."""
    shape = len(tokens), model.config.num_hidden_layers, model.config.num_experts_per_tok
    chosen = torch.full(shape, dense)

    def noting(number):
        def note(_router, _inputs, outputs):
            chosen[:, number] = outputs[2]

        return note

    hooks = [router.register_forward_hook(noting(number)) for number, router in _routers(model)]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return chosen
