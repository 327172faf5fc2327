"""Trains every method on one recorded stream: the batches are equal, so differences are those of the losses.

The stream is that of a run of one method. The others did not act, so none corrects its own mistakes: what is
compared is what each makes of the same data, which is harder than learning from data of its own."""

import asyncio
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.off_policy.cell_run import base_settings, make_model, settings_of
from benchmarks.off_policy.cells import METHODS, Cell
from benchmarks.whole_runs.run import run_to_its_end
from bus.codec import Json
from bus.errors import SluiceError
from bus.waiting import ended_before
from launch.operations.retrain import as_then
from launch.run_view.run_files import recorded_config
from launch.settings.run_config import Layer, resolve
from storage.disk.run_directory import RunDirectory
from storage.prompt_files.dataset import load_prompts
from storage.settings.data import PromptKeys

if TYPE_CHECKING:
    from torch import Tensor

ANSWERS = 8
"""Sampled answers to each held-out prompt."""


@dataclass(frozen=True)
class Retrained:
    """What a method made of the stream."""

    method: str
    batches_equal: bool
    """Whether each batch was the recorded one."""
    accuracy: float
    """Held-out accuracy at the end, sampled."""
    entropy: tuple[float, ...]
    """Mean entropy of each step, in nats."""
    grad_norm: tuple[float, ...]


@dataclass(frozen=True)
class Stream:
    """Which run the methods train on."""

    cell: Cell
    directory: Path
    given: Layer
    steps: int
    limit_s: float = 3600.0
    """Time limit of the run."""


async def compare(
    stream: Stream, methods: Sequence[str], stop: asyncio.Event, *, parallel: int
) -> dict[str, Json]:
    """Record the stream, unless it is there, and train each method on it, `parallel` at once.

    Raises `SluiceError` when the run of the stream fails, or on `stop`."""
    run = await recorded(stream, stop)
    loop = asyncio.get_running_loop()
    spawn = multiprocessing.get_context("spawn")  # each process has a world of its own
    with ProcessPoolExecutor(parallel, mp_context=spawn, max_tasks_per_child=1) as pool:
        work = [
            loop.run_in_executor(pool, partial(train_again, run.path.parent, run.name, m, stream.steps))
            for m in methods
        ]

        async def trained() -> list[Retrained]:
            return await asyncio.gather(*work)

        training = asyncio.create_task(trained())
        if not await ended_before(stop, training):
            training.cancel()  # what has begun ends by itself
            raise SluiceError("stopped before every method was trained")
        found = training.result()
    return {"stream": stream.cell.name, "steps": stream.steps, "methods": [figures(row) for row in found]}


async def recorded(stream: Stream, stop: asyncio.Event) -> RunDirectory:
    """Return the directory of the stream's run, which is made if it is not there."""
    run = RunDirectory(stream.directory, stream.cell.name)
    if run.exists and run.summary.exists():
        return run
    model = (stream.directory / "model").absolute()
    await make_model(model, stream.given, stream.directory, stop, limit_s=stream.limit_s)
    base = base_settings(stream.given, model, steps=stream.steps)
    return await run_to_its_end(
        settings_of(stream.cell, base, stream.directory), stop, limit_s=stream.limit_s
    )


def objective(method: str) -> Layer:
    """Return the settings of a method over those of any other."""
    neutral: Layer = {
        "correction": {"type": "auto"}, "rejection": {"type": "none"}, "aggregation": {"type": "auto"}
    }  # fmt: skip
    return {**neutral, **METHODS[method]}


def train_again(directory: Path, name: str, method: str, steps: int) -> Retrained:
    """Train a method on the first steps of a run, from its initial model, and answer the held-out prompts."""
    import torch

    from learner.history.retrain import retrain_steps

    torch.set_num_threads(1)
    run = RunDirectory(directory, name)
    config = recorded_config(run)
    changed = resolve(config.model_dump(), {"learner": objective(method)})
    with as_then(run, config) as (settings, initial, stores):
        weights: dict[str, Tensor] = {}
        trained = list(
            retrain_steps(
                settings,
                initial,
                stores,
                from_step=0,
                to_step=steps,
                changed=changed.learner,
                at_end=lambda backend: weights.update(backend.export()),
            )
        )
    return Retrained(
        method=method,
        batches_equal=all(step.batch_equal for step in trained),
        accuracy=heldout_accuracy(settings.model_directory, weights, run.path / "data" / "heldout.jsonl"),
        entropy=tuple(float("nan") if step.entropy is None else step.entropy for step in trained),
        grad_norm=tuple(step.grad_norm for step in trained),
    )


def heldout_accuracy(model_directory: Path, weights: Mapping[str, "Tensor"], prompts: Path) -> float:
    """Return the share of sampled answers to the held-out prompts that equal their label."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        model_directory, trust_remote_code=False, dtype=torch.float32
    )
    tied = (
        {"lm_head.weight": weights["model.embed_tokens.weight"]} if model.config.tie_word_embeddings else {}
    )
    model.load_state_dict({**weights, **tied})
    tokenizer = AutoTokenizer.from_pretrained(model_directory, trust_remote_code=False, padding_side="left")
    heldout = load_prompts(prompts, PromptKeys())
    chats = [[{"role": "user", "content": prompt.content}] for prompt in heldout]
    encoded = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    answers = model.generate(
        **encoded, do_sample=True, top_k=0, max_new_tokens=7, num_return_sequences=ANSWERS
    )
    texts = tokenizer.batch_decode(answers[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    labels = chain.from_iterable([prompt.label] * ANSWERS for prompt in heldout)
    return float(np.mean([text.strip() == label for text, label in zip(texts, labels, strict=True)]))


def figures(row: Retrained) -> dict[str, Json]:
    """Return what is reported of a method: its accuracy, and means of its last tenth of the steps."""
    last = slice(-max(1, len(row.entropy) // 10), None)
    values = asdict(row)
    return {
        "method": row.method,
        "batches_equal": row.batches_equal,
        "accuracy": round(row.accuracy, 4),
        "entropy_end_nats": round(float(np.mean(values["entropy"][last])), 4),
        "grad_norm_end": round(float(np.mean(values["grad_norm"][last])), 4),
        "grad_norm_mean": round(float(np.mean(values["grad_norm"])), 4),
    }
