"""Tells what it saves to compute the prompt of siblings once (learner.batch.share_prefixes).

A step is on groups of 16 siblings whose prompts are long, answers of different lengths, the answers trained
as reinforcement learning does. Training that shares the prompt and training that computes it for each sibling
take turns, step by step, with the same budget of a micro-batch. On CPU the model is a small Qwen3 in float32,
on CUDA a Qwen3-0.6B in bfloat16.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import Qwen3Config

from benchmarks.learner import ours, seconds_of, world
from benchmarks.learner_workloads import Workload, qwen3
from benchmarks.model_shapes import SHAPES
from bus.codec import Json
from learner.backends.contract.backend import StepResult
from learner.data.packing import MicroBatch, Sample, pack

CUDA = torch.cuda.is_available()
SIBLINGS = 16
SHORTEST, LONGEST = 0.5, 1.5
"""Lengths of answers over their mean."""
LIMITS: dict[str, Json] = {
    "shared_over_unshared": 2.0,
    "computed_over_unshared": 0.25,
    "loss_difference": 1e-6,
}
LIMITS_CUDA: dict[str, Json] = LIMITS | {"loss_difference": 2e-2}


@dataclass(frozen=True)
class Groups(Workload):
    """Groups of siblings; `sequence` is the mean length of prompt and answer together."""

    prompt: int
    """Tokens of each prompt."""
    groups: int
    share: bool = True

    def samples(self) -> list[Sample]:
        """Return the siblings of each group, of which the answers are trained."""
        rng = np.random.default_rng(0)
        answers = (rng.uniform(SHORTEST, LONGEST, SIBLINGS) * (self.sequence - self.prompt)).astype(int)
        prompts = rng.integers(0, self.model.vocab_size, (self.groups, self.prompt))
        return [
            self._sample(
                rng, np.append(prompts[group], rng.integers(0, self.model.vocab_size, length)), group
            )
            for group in range(self.groups)
            for length in answers
        ]

    def _sample(self, rng: np.random.Generator, text: np.ndarray, group: int) -> Sample:
        return Sample(
            token_ids=text.astype(np.int32),
            loss_mask=np.arange(len(text)) >= self.prompt,
            streams={
                "behaviour_logprobs": -float(np.log(self.model.vocab_size)),
                "policy_versions": 0,
                "advantages": float(rng.normal()),
            },
            group=group,
        )

    def batches(self) -> list[MicroBatch]:
        """Return the micro-batches of a step."""
        return pack(self.samples(), self.micro_batch, share_prefixes=self.share)


def workload_of(prompt: int | None = None, answer: int | None = None) -> Groups:
    """Return what this machine trains in seconds, with other lengths if they are given."""
    if CUDA:
        model = Qwen3Config(**SHAPES["qwen3-0.6b"], attn_implementation="sdpa", use_cache=False)
        dtype, micro_batch, groups, rounds = torch.bfloat16, 20480, 2, 3
        prompt, answer = prompt or 8192, answer or 512
    else:
        model = qwen3(128, 384, 2, 4, 2, 32, 4096)
        dtype, micro_batch, groups, rounds = torch.float32, 4096, 1, 5
        prompt, answer = prompt or 1024, answer or 128
    return Groups(model, dtype, prompt + answer, micro_batch, 1, rounds, prompt, groups)


def bench_prefix(workload: Groups) -> dict[str, Json]:
    """Return the ratios with their limits, and the absolute figures behind them."""
    with world():
        return side_by_side(workload)


def side_by_side(workload: Groups) -> dict[str, Json]:
    """Let both sides take turns in the world that there is, from the same weights."""
    torch.set_num_threads(1)
    steps = [_step(workload, share=share) for share in (True, False)]
    shared, unshared = (step() for step in steps)
    seconds = np.array([[seconds_of(step) for step in steps] for _ in range(workload.rounds)])
    medians = np.median(seconds, axis=0)
    return {
        "ratios": {
            "shared_over_unshared": float(np.median(seconds[:, 1] / seconds[:, 0])),
            "computed_over_unshared": shared.computed_tokens / unshared.computed_tokens,
            "loss_difference": abs(shared.loss - unshared.loss) / abs(unshared.loss),
        },
        "limits": LIMITS_CUDA if CUDA else LIMITS,
        "absolute": {
            "prompt_tokens": workload.prompt,
            "answer_tokens": workload.sequence - workload.prompt,
            "siblings": SIBLINGS,
            "computed_per_trained": shared.computed_tokens / shared.tokens,
            "unshared_computed_per_trained": unshared.computed_tokens / unshared.tokens,
            "trained_tokens_per_s": float(shared.tokens / medians[0]),
            "unshared_trained_tokens_per_s": float(unshared.tokens / medians[1]),
            **({"step_gib": _gib(steps[0]), "unshared_step_gib": _gib(steps[1])} if CUDA else {}),
        },
    }


def _step(workload: Groups, *, share: bool) -> Callable[[], StepResult]:
    torch.manual_seed(0)  # of the weights
    return ours(replace(workload, share=share))


def _gib(step: Callable[[], StepResult]) -> float:
    """Return the memory that a step needs besides weights, gradients and optimizer."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30
