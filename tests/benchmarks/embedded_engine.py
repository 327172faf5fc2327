"""Tells how fast the embedded engine is against transformers' own two ways, in one process and one thread.

`python -m benchmarks.embedded_engine` prints the figures as JSON."""

import asyncio
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import uvloop
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from actors.engines.base import GenerationRequest, Sampling
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.sglang.server.settings import interpreter
from actors.settings.engines import EmbeddedEngineConfig, SglangEngineConfig
from benchmarks.actors import ActorLoad, bench_actor
from bus.errors import ConfigError

Prompts = Sequence[Sequence[int]]
Way = Callable[["Workload"], AbstractContextManager[Callable[[], None]]]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model shape and the prompts to continue."""

    model: Qwen3Config
    prompts: Prompts
    new_tokens: int


def chat_workload() -> Workload:
    """Return 32 different prompts of 8 to 39 tokens, 128 new tokens each, hidden size 64."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 250, (8 + i,), generator=generator).tolist() for i in range(32)]
    return Workload(_qwen3(hidden=64, head_dim=16, vocab=320, intermediate=128, tied=False), prompts, 128)


def demo_workload() -> Workload:
    """Return the demo's rollouts: 32 prompts of 13 tokens, 8 samples each, 7 new tokens, hidden size 128."""
    distinct = torch.randint(5, 58, (32, 13), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [prompt for prompt in distinct for _ in range(8)]
    return Workload(_qwen3(hidden=128, head_dim=32, vocab=58, intermediate=256, tied=True), prompts, 7)


def bench_embedded(repeats: int = 5) -> dict[str, float]:
    """Measure tokens per second with log-probs, and ratios to `generate`: medians of interleaved rounds."""
    torch.set_num_threads(1)
    chat = _measure(chat_workload(), (_embedded, _generate, _continuous_batching), repeats)
    demo = _measure(demo_workload(), (_embedded, _generate), 4 * repeats)  # short rounds, so more of them
    return {
        "embedded_over_generate_32x128": _median(chat[:, 0] / chat[:, 1]),
        "embedded_over_generate_demo": _median(demo[:, 0] / demo[:, 1]),
        "continuous_batching_over_generate_32x128": _median(chat[:, 2] / chat[:, 1]),
        "embedded_32x128_tokens_per_s": _median(chat[:, 0]),
        "generate_32x128_tokens_per_s": _median(chat[:, 1]),
        "continuous_batching_32x128_tokens_per_s": _median(chat[:, 2]),
        "embedded_demo_tokens_per_s": _median(demo[:, 0]),
        "generate_demo_tokens_per_s": _median(demo[:, 1]),
    }


def bench_actors(
    config: SglangEngineConfig, build: Callable[[], PreTrainedModel], load: ActorLoad, *, embedded: bool
) -> dict[str, float | str]:
    """Measure the embedded engine and, where SGLang is installed, an actor on it.

    Args:
        config: of the server.
        build: makes the model that it serves.
        load: what is asked of it.
        embedded: False measures the server alone, and raises `ConfigError` where there is none."""
    if not embedded:
        return {**uvloop.run(bench_actor(config, build, load))}
    lacking = _lacking(config)
    measured: dict[str, float | str] = {**bench_embedded()}
    if lacking:
        return measured | {"sglang": f"not measured: {lacking}"}
    return measured | uvloop.run(bench_actor(config, build, load))


def _lacking(config: SglangEngineConfig) -> str | None:
    """Return why no server can be started here; None if one can. Raises `ConfigError` for a wrong
    interpreter."""
    if config.url is not None:
        return None
    try:
        interpreter(config)
    except ConfigError as error:
        if config.python is not None:
            raise
        return str(error)
    return None


def _measure(workload: Workload, ways: Sequence[Way], rounds: int) -> np.ndarray:
    """Return tokens per second, [rounds, ways]: taking turns lets a ratio survive a noisy machine."""
    tokens = len(workload.prompts) * workload.new_tokens
    with ExitStack() as stack:
        runs = [stack.enter_context(way(workload)) for way in ways]
        seconds = [[_seconds(run) for run in runs] for _ in range(rounds + 1)]
    return tokens / np.array(seconds[1:])


def _median(values: np.ndarray) -> float:
    return float(np.median(values))


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextmanager
def _embedded(workload: Workload) -> Iterator[Callable[[], None]]:
    engine = EmbeddedEngine(_model(workload, "sdpa"), EmbeddedEngineConfig(), policy_version=0)
    sampling = Sampling(max_new_tokens=workload.new_tokens)

    async def rollout() -> None:
        requests = (GenerationRequest(str(i), prompt, sampling) for i, prompt in enumerate(workload.prompts))
        await asyncio.gather(*map(engine.generate, requests))

    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield lambda: runner.run(rollout())
        runner.run(engine.close())


@contextmanager
def _generate(workload: Workload) -> Iterator[Callable[[], None]]:
    model = _model(workload, "sdpa")
    settings = _generation_config(workload, None)
    settings.output_logits = settings.return_dict_in_generate = True
    width = max(map(len, workload.prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in workload.prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts])

    @torch.inference_mode()
    def run() -> None:
        output = model.generate(ids, attention_mask=mask, generation_config=settings)
        logprobs = torch.stack(output.logits, 1).log_softmax(-1)
        logprobs.gather(2, output.sequences[:, width:, None])

    yield run


@contextmanager
def _continuous_batching(workload: Workload) -> Iterator[Callable[[], None]]:
    model = _model(workload, "paged|sdpa")
    settings = ContinuousBatchingConfig(  # the fastest of four settings tried
        num_blocks=64, page_size=256, max_batch_tokens=256, return_logprobs=True, use_cuda_graph=False
    )

    def run() -> None:
        model.generate_batch(
            inputs=[list(prompt) for prompt in workload.prompts],
            generation_config=_generation_config(workload, -1),
            continuous_batching_config=settings,
            progress_bar=False,
        )

    yield run


def _generation_config(workload: Workload, eos: int | None) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=workload.new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        eos_token_id=eos,
        pad_token_id=0,
    )


def _model(workload: Workload, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of its own paged attention
        return Qwen3ForCausalLM._from_config(workload.model, attn_implementation=attention).eval()


def _qwen3(*, hidden: int, head_dim: int, vocab: int, intermediate: int, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(bench_embedded(), indent=2) + "\n")
