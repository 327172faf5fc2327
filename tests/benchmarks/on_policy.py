"""Tells how far the learner's log-probs are from those that a SGLang server records, at equal weights.

Servers run as usual, in SGLang's deterministic mode, and in that for which the learner can compute by the
same kernels (model.numerics=sglang). They sample with the initial weights and with those after two updates,
and each learner then computes the log-probs of these tokens. Engines and learners have the GPU one after
another.

The figures of docs/exact.md on an H200:

    launch bench on-policy --model qwen3-0.6b --actors.engine.server.mem-fraction-static 0.3 --json
"""

import asyncio
import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from actors.engines.base import Generation, GenerationRequest, Sampling
from actors.engines.on_policy import on_policy
from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from benchmarks.random_models import random_model
from bus.codec import Json
from bus.errors import ConfigError
from learner.algorithms.losses.objective import Objective
from learner.backends.contract.backend import Backend
from learner.backends.factory import build_backend, close_world, init_world
from learner.backends.sglang_kernels.kernels import load_kernels
from learner.config.backend import BackendName
from learner.config.correction import TokenTIS
from learner.config.loss import ReinforceLoss
from learner.config.model import ModelConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED
from learner.data.packing import Sample, pack
from learner.logprobs.logprobs import score

MODES = ("ordinary", "deterministic", "on-policy")
"""How servers run."""
LEARNERS: Mapping[str, BackendName] = {"fsdp": "fsdp", "megatron": "megatron", "fsdp-sglang": "fsdp"}
"""Backends by the names of learners; the last computes by SGLang's kernels."""
SIBLINGS = 8
"""Answers that share a prompt, which the server then has in its cache."""
BATCHES = (1, 64)
"""Requests at a time."""
LONE_REQUESTS = 4
"""Requests that are alone, one after another."""
PEAKED = 4.0
"""Factor of the random model's last norm, so that some tokens are likely."""
UPDATES = 2
OPTIMIZER = OptimizerConfig(lr=1e-4)
BUDGET = 8192
"""Tokens of a micro-batch."""
State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Says what is sampled."""

    model: str = "tiny"
    new_tokens: int = 96
    longest_prompt: int = 400
    seed: int = 0

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return a prompt for each request of the largest batch, of several lengths."""
        draw = np.random.default_rng(self.seed)
        lengths = draw.integers(2, self.longest_prompt, max(BATCHES) // SIBLINGS)
        different = [draw.integers(0, vocabulary, length).tolist() for length in lengths]
        return [prompt for prompt in different for _ in range(SIBLINGS)]


class Answers(NamedTuple):
    """What a server sampled in one way."""

    name: str
    samples: list[Sample]


def usual(modes: Sequence[str], learners: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the modes and learners that are measured, by default all that this machine can run.

    Raises `ConfigError` for those that there are none of."""
    for name, given, known in (("modes", modes, MODES), ("learners", learners, tuple(LEARNERS))):
        if other := sorted(set(given) - set(known)):
            raise ConfigError(f"--{name} {','.join(other)}: there are {', '.join(known)}")
    if torch.cuda.is_available():
        return modes or MODES, learners or tuple(LEARNERS)
    return modes or MODES[:1], learners or tuple(LEARNERS)[:2]


def bench_on_policy(
    load: Load, engine: SglangEngineConfig, modes: Sequence[str], learners: Sequence[str]
) -> dict[str, Json]:
    """Return the figures of `differences` by mode, learner and way to sample.

    `engine` are the settings that servers have in all modes. Raises `ConfigError` for settings that
    contradict a mode, and for a learner whose kernels are not here."""
    settings = {mode: settings_of(mode, engine) for mode in modes}  # contradictions show before anything runs
    if "fsdp-sglang" in learners:
        load_kernels()
    model = random_model(load.model)
    with torch.no_grad():
        model.model.norm.weight.mul_(PEAKED)
    state = {name: tensor.detach().cpu() for name, tensor in model.named_parameters()}
    config: PretrainedConfig = model.config
    del model
    versions = [state, _updated(config, state, load)]
    answers = {mode: asyncio.run(_sampled(config, versions, settings[mode], load)) for mode in modes}
    figures: dict[str, dict[str, dict[str, Json]]] = {mode: {name: {} for name in learners} for mode in modes}
    for name in learners:
        for version, weights in enumerate(versions):
            of_version = {mode: answers[mode][version] for mode in modes}
            for mode, found in _compared(name, config, weights, of_version).items():
                figures[mode][name] |= found
    return {"model": load.model, "figures": figures}  # type: ignore[dict-item]  # of figures alone


def settings_of(mode: str, engine: SglangEngineConfig) -> SglangEngineConfig:
    """Return the settings of a server in a mode. Raises `ConfigError` for settings that contradict it."""
    if mode == "on-policy":
        return on_policy(engine)
    if mode == "ordinary":
        return engine
    mine = {"enable_deterministic_inference": True, "attention_backend": "triton"}
    return engine.model_copy(update={"server": {**mine, **engine.settings}})


@contextmanager
def _learner(name: str, config: PretrainedConfig, state: State) -> Iterator[Backend]:
    backend = LEARNERS[name]
    model = ModelConfig(
        dtype="bfloat16" if config.dtype == torch.bfloat16 else "float32",
        numerics="sglang" if name == "fsdp-sglang" else "fast",
    )
    init_world(backend=backend)
    try:
        yield build_backend(model, config, state, OPTIMIZER, UNDIVIDED, backend=backend)
    finally:
        close_world()


def _compared(
    name: str, config: PretrainedConfig, state: State, answers: Mapping[str, Sequence[Answers]]
) -> dict[str, dict[str, Json]]:
    """Return the figures of one learner at one version, by mode and way to sample."""
    _free_memory()
    with _learner(name, config, state) as learner:
        return {
            mode: {ways.name: dict(differences(learner, ways.samples)) for ways in of_mode}
            for mode, of_mode in answers.items()
        }


def _free_memory() -> None:
    """Free what a learner before has left on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _updated(config: PretrainedConfig, state: State, load: Load) -> State:
    """Return the weights after updates on random tokens."""
    draw = np.random.default_rng(load.seed)
    samples = []
    for number in range(8):
        tokens = draw.integers(0, config.vocab_size, 64).astype(np.int32)
        sample = _sample(tokens[:16], tokens[16:], np.full(48, -3.0, np.float32))
        samples.append(sample.with_streams(advantages=1.0 - 2.0 * (number % 2)))
    objective = Objective(ReinforceLoss(), TokenTIS())
    with _learner("fsdp", config, state) as learner:
        for _ in range(UPDATES):
            learner.train_step(pack(samples, BUDGET), objective, policy_version=0)
        return {name: tensor.cpu() for name, tensor in learner.export().items()}


async def _sampled(
    config: PretrainedConfig, versions: Sequence[State], settings: SglangEngineConfig, load: Load
) -> list[list[Answers]]:
    """Return what a server answers with each version, in all ways to sample."""
    _free_memory()
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        config.save_pretrained(Path(directory, "model"))
        engine = SglangEngine(Path(directory, "model"), settings, Path(directory, "engine.log"))
        try:
            await engine.start()
            answers = []
            for version, state in enumerate(versions):
                await engine.load_weights(state, version)
                answers.append(
                    [
                        Answers(
                            f"v{version} {how} x{batch}",
                            await _answers(engine, config, load, temperature, batch),
                        )
                        for how, temperature in (("greedy", 0.0), ("sampled", 1.0))
                        for batch in BATCHES
                    ]
                )
            return answers
        finally:
            await engine.close()


async def _answers(
    engine: SglangEngine, config: PretrainedConfig, load: Load, temperature: float, batch: int
) -> list[Sample]:
    prompts = load.prompts(config.vocab_size)
    sampling = Sampling(temperature=temperature, max_new_tokens=load.new_tokens)
    requests = [
        GenerationRequest(f"{temperature}-{batch}-{n}", prompt, replace(sampling, seed=n))
        for n, prompt in enumerate(prompts)
    ]
    if batch == 1:
        lone = requests[:: len(requests) // LONE_REQUESTS]
        generations = [await engine.generate(each) for each in lone]
        return [_of(*each) for each in zip(lone, generations, strict=True)]
    generations = await asyncio.gather(*map(engine.generate, requests))
    return [_of(*each) for each in zip(requests, generations, strict=True)]


def _of(request: GenerationRequest, generation: Generation) -> Sample:
    prompt = np.array(request.token_ids, np.int32)
    return _sample(prompt, generation.token_ids, generation.logprobs)


def _sample(prompt: NDArray[np.int32], answer: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Sample:
    length = len(prompt) + len(answer)
    return Sample(
        token_ids=np.concatenate((prompt, answer)).astype(np.int32),
        loss_mask=np.arange(length) >= len(prompt),
        streams={
            "behaviour_logprobs": np.concatenate((np.zeros(len(prompt), np.float32), logprobs)),
            "policy_versions": np.zeros(length, np.int32),
            "advantages": 1.0,
        },
    )


def differences(learner: Backend, samples: Sequence[Sample]) -> dict[str, float]:
    """Compare log-probs: share that is equal to the bit, of all and of first tokens, which prompts alone
    predict, mean and largest distance in nats, estimates k1 and k3 of the divergence, and the share of
    effective samples."""
    found = score(learner, samples, tokens_per_micro_batch=BUDGET)
    by_answer = [
        (scores.logprobs - sample.streams["behaviour_logprobs"])[sample.loss_mask].astype(np.float64)
        for sample, scores in zip(samples, found, strict=True)
    ]
    apart, first = np.concatenate(by_answer), np.array([each[0] for each in by_answer])
    ratio = np.exp(apart)
    return {
        "tokens": len(apart),
        "bit_equal_fraction": float((apart == 0).mean()),
        "bit_equal_fraction_of_first": float((first == 0).mean()),
        "mean_nats": float(np.abs(apart).mean()),
        "largest_nats": float(np.abs(apart).max()),
        "k1_nats": float(-apart.mean()),
        "k3_nats": float((ratio - 1 - apart).mean()),
        "ess_fraction": float(ratio.sum() ** 2 / (len(ratio) * np.square(ratio).sum())),
    }
