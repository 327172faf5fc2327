"""Tells how fast a step of the learner is, on both backends, beside a bare megatron-core loop and
transformers on the same batch.

`python -m benchmarks.learner` prints the figures as JSON. On CPU a small Qwen3 in float32, the sides
taking turns step by step; on CUDA a Qwen3-0.6B and two small mixtures of experts in bfloat16, the sides
taking longer turns, and besides adapters, Muon, weights rounded to fp8 and products in fp8 beside a step
without. Names of sides behind the command, as in `fsdp_16k hf_16k`, print a line of JSON for each of these
alone. Our sides compute the RL loss with its importance ratios, entropy and diagnostics; the others a plain
cross-entropy. A loss over whole sequences, which makes the logits twice, is measured against ours over
tokens; a Qwen3-VL whose sequences show an image each, on the FSDP backend against transformers.
"""

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from benchmarks.learner_bare_megatron import BareLoop
from benchmarks.learner_images import ImageWorkload, qwen3_vl_600m, small_images
from benchmarks.learner_workloads import Workload, qwen3_600m, small, small_experts, small_latent
from bus.codec import Json
from bus.errors import ConfigError
from learner.algorithms.losses.objective import Objective
from learner.backends.contract.backend import Backend, StepResult
from learner.backends.factory import BACKENDS, close_world, init_world
from learner.backends.quantised.rounding import Rounding
from learner.config.backend import BackendName
from learner.config.correction import TokenTIS
from learner.config.lora import NO_LORA, LoraConfig
from learner.config.loss import GSPOLoss, ReinforceLoss
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.distributed.process_group import device
from storage.weights.quantisation import FORMATS

PEAK_FLOPS = 989e12
"""Dense bfloat16 of one H100 or H200 SXM, by the vendor's datasheet."""
CUDA_ROUNDS = 2
"""Turns that each side has on CUDA, where it has the memory for itself."""
ALONE_TIMEOUT_S = 900.0
"""Seconds that a side may take in a process of its own."""
OPTIMIZER = OptimizerConfig(lr=1e-6)
MUON = OptimizerConfig(lr=1e-6, matrices="muon")
ADAPTERS = LoraConfig(rank=16)
FP8 = Rounding(FORMATS["fp8_block"], torch.bfloat16)
OVER_TOKENS = Objective(ReinforceLoss(), TokenTIS())
OVER_SEQUENCES = Objective(GSPOLoss())
LIMITS: dict[str, Json] = {
    "step_over_bare": 0.95,
    "step_over_hf": 0.9,
    "sequences_over_tokens": 0.7,
    "fsdp_over_hf": 0.9,
    "images_fsdp_over_hf": 0.9,
}
LIMITS_CUDA: dict[str, Json] = {
    "step_over_bare": 1.8,
    "step_over_hf": 1.0,
    "sequences_over_tokens": 0.8,
    "mfu": 0.45,
    "fsdp_over_hf": 0.9,
    "experts_over_hf": 1.0,
    "experts_fsdp_over_hf": 0.9,
    "images_fsdp_over_hf": 0.9,
    "latent_over_hf": 1.0,
    "adapters_over_weights": 1.1,
    "muon_over_adamw": 0.9,
    "rounded_over_weights": 0.85,
    "fp8_over_bfloat16": 1.0,  # products in fp8 are there for nothing but speed
}
"""What users should be able to expect, whether it is reached or not: docs/performance.md has both."""


SIDES = ("", "bare_", "hf_", "sequences_", "fsdp_", "images_fsdp_", "images_hf_")
"""What begins the names of figures on a CPU, by side."""
Step = Callable[[], object]


def ours(
    workload: Workload, *, recompute: bool = False, objective: Objective = OVER_TOKENS,
    backend: BackendName = "megatron", optimizer: OptimizerConfig = OPTIMIZER, lora: LoraConfig = NO_LORA,
    rounding: Rounding | None = None, fp8: bool = False,
) -> Callable[[], StepResult]:  # fmt: skip
    """Return a step of the learner on batches that are packed."""
    parallel = ParallelConfig(recompute="full" if recompute else "none")
    trainer = trainer_of(workload, parallel, backend, optimizer=optimizer, lora=lora)
    if rounding is not None:
        trainer.compute_with(rounding)
    if fp8:
        trainer.multiply_in_fp8()
    batches = workload.batches()
    return lambda: trainer.train_step(batches, objective, policy_version=0)


def trainer_of(
    workload: Workload, parallel: ParallelConfig, backend: BackendName, *,
    optimizer: OptimizerConfig = OPTIMIZER, lora: LoraConfig = NO_LORA,
) -> Backend:  # fmt: skip
    """Return a backend that trains a model of this shape, in the world that there is."""
    model = model_of(workload)
    shown = {"images": workload.images} if isinstance(workload, ImageWorkload) else {}
    return BACKENDS[backend]()(
        workload.model,
        revert_weight_conversion(model, model.state_dict()),  # by the names that files have
        optimizer,
        dtype=workload.dtype,
        parallel=parallel,
        lora=lora,
        **shown,
    )


def fsdp(workload: Workload) -> Step:
    """Return a step of the learner's other backend."""
    return ours(workload, backend="fsdp")


def adapters(workload: Workload) -> Step:
    """Return a step of the learner that trains low-rank adapters of all linear layers."""
    return ours(workload, lora=ADAPTERS)


def muon(workload: Workload) -> Step:
    """Return a step of the learner whose matrices are updated by Muon."""
    return ours(workload, optimizer=MUON)


def rounded(workload: Workload) -> Step:
    """Return a step of the learner that computes with the weights that engines in fp8 have."""
    return ours(workload, rounding=FP8)


def in_fp8(workload: Workload) -> Step:
    """Return a step of the learner whose linear layers multiply in fp8."""
    return ours(workload, fp8=True)


def model_of(workload: Workload) -> PreTrainedModel:
    """Return a model of this shape with random float32 weights, on the host."""
    kind = AutoModelForImageTextToText if isinstance(workload, ImageWorkload) else AutoModelForCausalLM
    with torch.device(device()):  # a GPU draws a billion numbers in no time
        return kind.from_config(workload.model, dtype=torch.float32).cpu()


def over_sequences(workload: Workload) -> Step:
    """Return a step of the learner with a loss of whole sequences, whose logits are made twice."""
    return ours(workload, objective=OVER_SEQUENCES)


def bare(workload: Workload) -> Step:
    """Return a step of megatron-core as it comes, with nothing of ours."""
    loop = BareLoop(workload.model, workload.dtype, lr=OPTIMIZER.lr)
    batches = [batch.to(device()) for batch in workload.batches()]
    return lambda: loop.step(batches)


def hugging_face(workload: Workload) -> Step:
    """Return a step of transformers with torch's AdamW; on CUDA with liger-kernel, where it is installed and
    the model is a Qwen3 of text."""
    if torch.cuda.is_available() and find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3, apply_liger_kernel_to_qwen3_moe

        if isinstance(workload.model, Qwen3Config | Qwen3MoeConfig):
            sparse = isinstance(workload.model, Qwen3MoeConfig)
            (apply_liger_kernel_to_qwen3_moe if sparse else apply_liger_kernel_to_qwen3)()
    model = model_of(workload).to(device(), workload.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER.lr, fused=True)
    batches = [
        {name: values.to(device()) for name, values in workload.plain_inputs(batch).items()}
        for batch in workload.batches()
    ]

    def step() -> None:
        for inputs in batches:
            (model(**inputs).loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


def bench_learner() -> dict[str, Json]:
    """Ratios with their limits, and the absolute figures behind them."""
    with world():
        return _on_cuda() if torch.cuda.is_available() else side_by_side(small(), small_images())


@contextmanager
def world() -> Iterator[None]:
    """Be a world of one rank."""
    init_world()
    try:
        yield
    finally:
        close_world()


def side_by_side(workload: Workload, images: ImageWorkload) -> dict[str, Json]:
    """Ratios of the sides taking turns, in the world that there is."""
    torch.set_num_threads(1)
    given = [(side, workload) for side in (ours, bare, hugging_face, over_sequences, fsdp)]
    given += [(side, images) for side in (fsdp, hugging_face)]
    steps = [side(trained) for side, trained in given]
    seconds = np.array([[seconds_of(step) for step in steps] for _ in range(workload.rounds + 1)])[1:]
    ratios = np.median(seconds / seconds[:, :1], axis=0)
    rates = np.array([trained.tokens for _, trained in given]) / np.median(seconds, axis=0)
    return {
        "ratios": {
            "step_over_bare": float(ratios[1]),
            "step_over_hf": float(ratios[2]),
            "sequences_over_tokens": float(1 / ratios[3]),
            "fsdp_over_hf": float(ratios[2] / ratios[4]),
            "images_fsdp_over_hf": float(np.median(seconds[:, 6] / seconds[:, 5])),
        },
        "limits": LIMITS,
        "absolute": dict(zip([f"{name}tokens_per_s" for name in SIDES], rates.tolist(), strict=True)),
    }


def sides() -> Mapping[str, tuple[Callable[[Workload], Step], Workload]]:
    """Return each side by its name, with what it trains on this machine."""
    if not torch.cuda.is_available():
        few = small()
        every = {"ours": ours, "bare": bare, "hf": hugging_face, "sequences": over_sequences, "fsdp": fsdp}
        seen = small_images()
        return {name: (side, few) for name, side in every.items()} | {
            "images_fsdp": (fsdp, seen),
            "images_hf": (hugging_face, seen),
        }
    large, less, experts = qwen3_600m(tokens=32768), qwen3_600m(tokens=16384), small_experts()
    latent, images = small_latent(), qwen3_vl_600m()
    return {
        "ours": (ours, large),
        "hf": (hugging_face, large),
        "sequences": (over_sequences, large),
        "recompute": (lambda workload: ours(workload, recompute=True), large),
        "16k": (ours, less),
        "bare_16k": (bare, less),  # more tokens at once do not fit: it keeps their logits
        "fsdp_16k": (fsdp, less),  # it keeps more of each layer: 32k may not fit into 80 GB
        "hf_16k": (hugging_face, less),
        "experts": (ours, experts),
        "experts_fsdp": (fsdp, experts),
        "experts_hf": (hugging_face, experts),
        "latent": (ours, latent),
        "latent_hf": (hugging_face, latent),
        "adapters": (adapters, large),
        "muon": (muon, large),
        "rounded": (rounded, large),
        "fp8": (in_fp8, large),
        "images_fsdp": (fsdp, images),
        "images_hf": (hugging_face, images),
    }


def single_sides(
    names: Sequence[str], known: Mapping[str, tuple[Callable[[Workload], Step], Workload]]
) -> Iterator[dict[str, Json]]:
    """Measure the side of this name in the world that there is, or several in a process each, so that none
    computes with the modules that another changed.

    Raises `ConfigError` for an unknown name."""
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"sides {unknown} are not among {list(known)}")
    for name in names:
        yield {"side": name, **(_measured(*known[name]) if len(names) == 1 else _alone(name))}


def _alone(name: str) -> dict[str, float]:
    """Measure a side in a process of its own: liger-kernel changes classes of transformers for good, also for
    the FSDP2 backend, which computes with them."""
    command = [sys.executable, "-m", "benchmarks.learner", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=ALONE_TIMEOUT_S)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]  # libraries print others
    found: dict[str, float] = json.loads(line)
    return {key: value for key, value in found.items() if key != "side"}


def _on_cuda() -> dict[str, Json]:
    """Return ratios of the medians of several rounds, in each of which every side has its turn by itself."""
    known = sides()
    rounds = [
        {
            name: _alone(name) if side is hugging_face else _measured(side, workload)
            for name, (side, workload) in known.items()
        }
        for _ in range(CUDA_ROUNDS)
    ]
    figures = {
        f"{'' if name == 'ours' else name + '_'}{key}": statistics.median(
            found[name][key] for found in rounds
        )
        for name in known
        for key in rounds[0][name]
    }
    rate = figures["tokens_per_s"]
    return {
        "ratios": {
            "step_over_bare": figures["16k_tokens_per_s"] / figures["bare_16k_tokens_per_s"],
            "step_over_hf": rate / figures["hf_tokens_per_s"],
            "sequences_over_tokens": figures["sequences_tokens_per_s"] / rate,
            "mfu": figures["mfu"],
            "fsdp_over_hf": figures["fsdp_16k_tokens_per_s"] / figures["hf_16k_tokens_per_s"],
            "experts_over_hf": figures["experts_tokens_per_s"] / figures["experts_hf_tokens_per_s"],
            "experts_fsdp_over_hf": figures["experts_fsdp_tokens_per_s"] / figures["experts_hf_tokens_per_s"],
            "images_fsdp_over_hf": figures["images_fsdp_tokens_per_s"] / figures["images_hf_tokens_per_s"],
            "latent_over_hf": figures["latent_tokens_per_s"] / figures["latent_hf_tokens_per_s"],
            "adapters_over_weights": figures["adapters_tokens_per_s"] / rate,
            "muon_over_adamw": figures["muon_tokens_per_s"] / rate,
            "rounded_over_weights": figures["rounded_tokens_per_s"] / rate,
            "fp8_over_bfloat16": figures["fp8_tokens_per_s"] / rate,
        },
        "limits": LIMITS_CUDA,
        "absolute": {
            "gpu": torch.cuda.get_device_name(),
            "hf_with_liger": find_spec("liger_kernel") is not None,
            **figures,
        },
    }


def _measured(side: Callable[[Workload], Step], workload: Workload) -> dict[str, float]:
    """Measure one side by itself, then give its memory back."""
    with released():
        step = side(workload)
        step()
        if cuda := torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        step()
        seconds = statistics.median(seconds_of(step) for _ in range(workload.rounds))
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        del step
    return {
        "tokens_per_s": workload.tokens / seconds,
        "mfu": workload.flops() / seconds / PEAK_FLOPS,
        "peak_gib": peak / 2**30,
    }


@contextmanager
def released() -> Iterator[None]:
    """Give back the GPU's memory of what was made inside and is gone."""
    try:
        yield
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def seconds_of(step: Step, *, wall: bool = False) -> float:
    """Measure a step: on CPU by the time of this process, whose one thread feels other work little.

    A step that waits for other processes is measured by the `wall` clock there too."""
    clock = time.perf_counter if wall or torch.cuda.is_available() else time.process_time
    _wait()
    began = clock()
    step()
    _wait()
    return clock() - began


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Print the figures of all sides, or of those that are named."""
    if not (names := sys.argv[1:]):
        print(json.dumps(bench_learner(), indent=2))  # noqa: T201 - the user's terminal
        return
    with world():
        for found in single_sides(names, sides()):
            print(json.dumps(found), flush=True)  # noqa: T201 - the user's terminal


if __name__ == "__main__":
    main()
