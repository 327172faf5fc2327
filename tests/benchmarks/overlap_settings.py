"""Tells what `launch bench overlap` measures: the settings of its run, its model and its prompts."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

from benchmarks.random_models import shape, write_model
from bus.errors import ConfigError
from launch.settings.run_config import Layer, RunConfig, resolve
from storage.disk.atomic_files import make_directory, write_file
from storage.metrics.records import integer

FOREVER = 1_000_000
PROMPTS = 4096
TEMPLATE_TOKENS = 2
"""Around a prompt."""
PROMPTS_FILE, MODEL_DIRECTORY = "prompts.jsonl", "model"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def defaults(model: str, directory: Path, *, devices: Mapping[str, int | None]) -> Layer:
    """Return the settings of the measured run, under those that the user gives.

    Args:
        model: a name in `bench_models`.
        directory: where the run goes, its model and its prompts.
        devices: GPU of the processes "learner" and "actors", as CUDA numbers them; None leaves it to CUDA."""
    small = model == "tiny"
    longest = 192 if small else 4096
    visible = {name: {"CUDA_VISIBLE_DEVICES": str(gpu)} for name, gpu in devices.items() if gpu is not None}
    dtype = str(shape(model).dtype).removeprefix("torch.")
    return {
        "run": "overlap",
        "directory": directory,
        "data": {"prompts": directory / PROMPTS_FILE},
        "admission": {"groups_per_step": 8 if small else 32, "samples_per_prompt": 4 if small else 8},
        "sampling": {"max_new_tokens": longest},
        "model": {"path": directory / MODEL_DIRECTORY, "dtype": dtype},
        "learner": {
            "steps": FOREVER,
            "publish_dtype": dtype,
            "optimizer": {"lr": 1e-6},
            "checkpoint": {"save_every": FOREVER},
        },
        "evaluation": {"every_versions": 0},
        "actors": {
            "environment": {
                "type": "length_profile",
                "lengths": {"type": "log_normal", "median": 24 if small else 512, "longest": longest},
            },
            "engine": {"dtype": dtype},
            "groups_at_once": 512,
        },
        "supervision": {"restarts": FOREVER, "longest_pause_s": 0.5, "environment": visible},
    }


def settings(layers: Layer, below: Layer, model: str, *, prompt_tokens: int) -> RunConfig:
    """Return what the user gives over the `defaults`. Raises `ConfigError` for what cannot be measured."""
    if url := layers.get("bus", {}).get("url"):
        raise ConfigError(f"--bus.url {url}: the measured run has a bus of its own, leave this out")
    config = resolve(below, layers)
    if config.admission.max_staleness < 1:
        raise ConfigError(
            f"--admission.max-staleness {config.admission.max_staleness}: both modes would be synchronous, "
            "give 1 at least"
        )
    resolve(below, layers, {"admission": {"max_staleness": 0}})
    model_path, prompts = config.model.path, config.data.prompts
    if model_path not in (None, below["model"]["path"]) and not (model_path / "config.json").exists():
        raise ConfigError(f"--model.path {model_path}: there is no model; leave it out to have one made")
    if prompts not in (None, below["data"]["prompts"]):
        if not prompts.exists():
            raise ConfigError(f"--data.prompts {prompts}: there is no file; leave it out to have one made")
        return config
    longest, context = config.sampling.max_new_tokens, _context(config, model)
    if prompt_tokens < 1 or prompt_tokens + TEMPLATE_TOKENS + longest > context:
        raise ConfigError(
            f"--prompt-tokens {prompt_tokens}: give at least 1, and with {TEMPLATE_TOKENS} of the template "
            f"and sampling.max_new_tokens={longest} no more than the model's context of {context}"
        )
    return config


def _context(config: RunConfig, model: str) -> int:
    """Return the number of positions of the model."""
    if config.model.path is None or not config.model.path.exists():
        return int(shape(model).max_position_embeddings)
    found = json.loads((config.model.path / "config.json").read_text())
    return integer(found, "max_position_embeddings") or FOREVER


def make(config: RunConfig, model: str, *, prompt_tokens: int) -> None:
    """Write, beside the run, what the user did not name: prompts of so many characters, the model."""
    draw = random.Random(0)
    make_directory(config.directory)
    if config.data.prompts == config.directory / PROMPTS_FILE:
        texts = ("".join(draw.choices(LETTERS, k=prompt_tokens)) for _ in range(PROMPTS))
        lines = (json.dumps({"prompt": text}) + "\n" for text in texts)
        write_file(config.data.prompts, "".join(lines).encode())
    if config.model.path == config.directory / MODEL_DIRECTORY:
        write_model(model, config.model.path)
