"""Runs in SGLang's process, as a custom weight loader: checks the tensors that a learner broadcasts. SGLang
gives what it receives to the model's own `load_weights`, which is replaced until all that was offered has
come. Imports nothing of Sluice."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)
MOST_THREADS = 16
Named = tuple[str, torch.Tensor]


class _Checked:
    """Loads what a learner broadcasts, one bucket late: threads hash a bucket while the next is received, and
    it is loaded once its tensors have their digests."""

    def __init__(self, model: Any, digests: dict[str, str]) -> None:
        self._model = model
        self._digests = digests
        """Digests of what has not come."""
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), "digests")
        self._hashing: list[_Hashed] = []
        """Tensors that have come last, and are not loaded."""
        self._waited_s = 0.0

    def load(self, weights: Iterable[Named]) -> None:
        """Take the next bucket, and load the one before; with the last one that was offered, it too. Raises
        `ValueError` where a tensor has another digest, on all ranks, and loads none of its bucket."""
        before, self._hashing = self._hashing, self._hashed(weights)
        self._load(before)
        if not self._digests:
            vars(self._model).pop("load_weights", None)
            self._load(self._hashing)
            log.info("broadcast tensors have their digests, for which loading waited %.3f s", self._waited_s)

    def _hashed(self, weights: Iterable[Named]) -> list["_Hashed"]:
        named = list(weights)
        for device in {tensor.device for _, tensor in named if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # threads have streams of their own
        return [
            _Hashed(name, tensor, self._digests.pop(name, ""), self._threads.submit(_sha256, tensor))
            for name, tensor in named
        ]

    def _load(self, bucket: Sequence["_Hashed"]) -> None:
        if not bucket:
            return
        began = time.perf_counter()
        other = next((one for one in bucket if one.sha256.result() != one.expected), None)
        self._waited_s += time.perf_counter() - began
        if reason := _of_all_ranks(
            f"{other.name}, whose SHA-256 is {other.sha256.result()}" if other else ""
        ):
            self._hashing = []
            raise ValueError(f"what came is not what the learner offered: {reason}")
        type(self._model).load_weights(self._model, [(one.name, one.tensor) for one in bucket])


class _Hashed(NamedTuple):
    """A tensor that has come."""

    name: str
    tensor: torch.Tensor
    expected: str
    """Digest that was offered; empty for a tensor that was not."""
    sha256: Future[str]


def expect_1(model: Any, named_tensors: Sequence[Named]) -> None:
    """Have the model refuse tensors that are not those of the digests: the only tensor holds the bytes of a
    JSON object, SHA-256 in hexadecimal by Hugging Face name. An empty one has it take what comes again."""
    [(_, text)] = named_tensors
    digests = json.loads(text.cpu().numpy().tobytes())
    vars(model).pop("load_weights", None)
    if digests:
        model.load_weights = _Checked(model, digests).load


EXPECT = f"sluice_digests.{expect_1.__name__}"
"""Name of `expect_1` among SGLang's custom weight loaders."""


def _of_all_ranks(problem: str) -> str:
    """Return what is wrong on any rank: the first one alone answers, and none may have what others refuse."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return problem
    problems: list[Any] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next(filter(None, problems), "")


def _sha256(tensor: torch.Tensor) -> str:
    tensor = tensor.detach().cpu()
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    return hashlib.sha256(raw).hexdigest()
