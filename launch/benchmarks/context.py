"""Tells how fast ranks that share the tokens of each sequence train, and how much memory they need.

Run by torchrun, with as many ranks as are to share:
`torchrun --standalone --nproc-per-node 2 -m launch.benchmarks.context --attention ring --lengths 65536`.
Rank 0 prints one JSON object. Each process measures one setting, so that peaks of memory are its own.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from bus.codec import Json
from launch.benchmarks.learner import OPTIMIZER, OVER_TOKENS
from launch.benchmarks.model_shapes import SHAPES
from learner.backends.factory import BACKENDS, close_world, init_world
from learner.config.parallel import ParallelConfig
from learner.data.packing import MicroBatch, Sample, pack
from learner.world.process_group import device, gathered, world_size


def micro_batches(lengths: Sequence[int], budget: int, vocabulary: int) -> list[MicroBatch]:
    """Return random trajectories of these lengths, packed by a budget of tokens."""
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
            loss_mask=np.arange(length) > 0,
            streams={
                "behaviour_logprobs": -float(np.log(vocabulary)),
                "policy_versions": 0,
                "advantages": float(rng.normal()),
            },
        )
        for length in lengths
    ]
    return pack(samples, budget)


def measured(
    shape: str, lengths: Sequence[int], budget: int, steps: int, parallel: ParallelConfig
) -> dict[str, Json]:
    """Train on the same trajectories again and again, in the world that there is."""
    config = Qwen3Config(**SHAPES[shape], attn_implementation="sdpa", use_cache=False)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    torch.manual_seed(0)  # every rank starts with the same weights
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    trainer = BACKENDS["megatron"]()(config, model.state_dict(), OPTIMIZER, dtype=dtype, parallel=parallel)
    batches = micro_batches(lengths, budget, config.vocab_size)
    losses = [trainer.train_step(batches, OVER_TOKENS, policy_version=0).loss]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    losses += [trainer.train_step(batches, OVER_TOKENS, policy_version=0).loss for _ in range(steps)]
    seconds = time.perf_counter() - start  # a step waits for its loss
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else str(device()),
        "ranks": parallel.context,
        "context_attention": parallel.context_attention,
        "context_min_tokens": parallel.context_min_tokens,
        "recompute": parallel.recompute,
        "tokens_per_s": steps * sum(lengths) / seconds,
        "peak_gib_by_rank": [*gathered(peak)],
        "losses": [*losses],
    }


def main(arguments: Sequence[str]) -> None:
    """Print the figures as JSON, from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", choices=("gather", "ring"), default="gather")
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536], help="of the sequences of a step")
    parser.add_argument("--budget", type=int, default=65536, help="tokens of a micro-batch")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--min-tokens", type=int, default=0, help="shorter sequences stay whole")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args(arguments)
    parallel = ParallelConfig(
        context=world_size(),
        context_attention=options.attention,
        context_min_tokens=options.min_tokens,
        recompute=options.recompute,
    )
    init_world(parallel)
    figures = measured(options.shape, options.lengths, options.budget, options.steps, parallel)
    if int(torch.distributed.get_rank()) == 0:
        sys.stdout.write(json.dumps(figures) + "\n")
    close_world()


if __name__ == "__main__":
    main(sys.argv[1:])
