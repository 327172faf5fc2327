"""Runs in SGLang's process, as a custom weight loader: checks the tensors that a learner broadcasts. SGLang
gives what it receives to the model's own `load_weights`, which is replaced until all that was offered has
come. Imports nothing of Sluice."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)
MOST_THREADS = 16
Named = tuple[str, torch.Tensor]


def expect_1(model: Any, named_tensors: Sequence[Named]) -> None:
    """Have the model refuse tensors that are not those of the digests: the only tensor holds the bytes of a
    JSON object, SHA-256 in hexadecimal by Hugging Face name. An empty one has it take what comes again."""
    [(_, text)] = named_tensors
    digests = json.loads(text.cpu().numpy().tobytes())
    vars(model).pop("load_weights", None)
    if digests:
        model.load_weights = partial(_load_checked, model, digests)


EXPECT = f"sluice_digests.{expect_1.__name__}"
"""Name of `expect_1` among SGLang's custom weight loaders."""


def _load_checked(model: Any, digests: dict[str, str], weights: Iterable[Named]) -> Any:
    """Load tensors whose digests are the announced ones. Raises `ValueError` before any is loaded where one
    has another digest, on all ranks: SGLang answers so."""
    began, named = time.perf_counter(), list(weights)
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "digests") as pool:  # one is hashed while the next leaves the device
        found = [pool.submit(_sha256, tensor.detach().cpu()) for _, tensor in named]
    came = {name: digest.result() for (name, _), digest in zip(named, found, strict=True)}
    others = [name for name in came if digests.pop(name, "") != came[name]]
    if reason := _of_all_ranks(f"{others[0]}, whose SHA-256 is {came[others[0]]}" if others else ""):
        raise ValueError(f"what came is not what the learner offered: {reason}")
    log.info("%d tensors have their digests, checked in %.3f s", len(named), time.perf_counter() - began)
    if not digests:
        vars(model).pop("load_weights", None)
    return type(model).load_weights(model, named)


def _of_all_ranks(problem: str) -> str:
    """Return what is wrong on any rank: the first one alone answers, and none may have what others refuse."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return problem
    problems: list[Any] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next(filter(None, problems), "")


def _sha256(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    return hashlib.sha256(raw).hexdigest()
