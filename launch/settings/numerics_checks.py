"""Settings that do not go with the arithmetic that learner and engine are to share (model.numerics)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from actors.engines.on_policy import on_policy, unlike_learner
from actors.settings.engines import EngineConfig
from bus.errors import ConfigError
from storage.settings.exact_arithmetic import MOST_TOKENS

if TYPE_CHECKING:
    from launch.settings.run_config import RunConfig
    from learner.config.learner import LearnerConfig


def check_numerics(config: "RunConfig") -> None:
    """Raise `ConfigError` with all settings by which learner and engine would not compute alike."""
    numerics = config.model.numerics
    if numerics == "fast":
        return
    problems = [*(_inexact(config) if numerics == "exact" else _unlike_sglang(config)), *_of_both(config)]
    if problems:
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise ConfigError(f"model.numerics={numerics} needs other settings; set it to fast, or:\n{listed}")


def engine_of(config: "RunConfig") -> EngineConfig:
    """Return the settings of the actors' engines, with those that the run's arithmetic adds."""
    engine = config.actors.engine
    return on_policy(engine) if config.model.numerics == "sglang" else engine


def _inexact(config: "RunConfig") -> Iterator[str]:
    if config.model.dtype == "bfloat16":
        yield f"model.dtype={config.model.dtype}: set it to float32"
    if problem := config.actors.engine.inexact:
        yield problem
    if config.sampling.max_new_tokens >= MOST_TOKENS:
        yield (
            f"sampling.max_new_tokens={config.sampling.max_new_tokens}: exact sums take at most "
            f"{MOST_TOKENS} tokens of prompt and answer together; lower it"
        )
    yield from _of_learner(config.learner)


def _of_learner(learner: "LearnerConfig") -> Iterator[str]:
    if learner.publish_dtype == "bfloat16":
        yield f"learner.publish_dtype={learner.publish_dtype}: engines would get rounded weights; set float32"
    if learner.publication.quantisation != "none" and not learner.quantisation_aware:
        yield (
            f"learner.publication.quantisation={learner.publication.quantisation}: set it to none, or "
            "learner.quantisation_aware to true, with which the learner computes with the same weights"
        )
    for name in ("tensor", "pipeline", "virtual_pipeline", "context"):
        if (ranks := getattr(learner.parallel, name)) > 1:
            yield f"learner.parallel.{name}={ranks}: ranks would share sums; set it to 1"


def _unlike_sglang(config: "RunConfig") -> Iterator[str]:
    learner, sampling = config.learner, config.sampling
    if learner.backend != "fsdp":
        yield f"learner.backend={learner.backend}: its kernels are others; set it to fsdp"
    for name, dtype in (
        ("model.dtype", config.model.dtype),
        ("learner.publish_dtype", learner.publish_dtype),
    ):
        if dtype == "float32":
            yield f"{name}={dtype}: set it to bfloat16"
    yield from unlike_learner(config.actors.engine)
    if sampling.temperature != 1.0:
        yield (
            f"sampling.temperature={sampling.temperature}: the server's log-probs in float32 are those at 1; "
            "set it to 1"
        )
    if sampling.cuts_off:
        yield "sampling.top_p, top_k or min_p cut tokens off: set them to 1, 0 and 0"
    for name, environment in config.actors.by_name.items():
        gateway = getattr(environment, "gateway", None)
        if gateway is not None and "temperature" not in gateway.pinned:
            where = f"environment {name!r} of actors.environments" if name else "actors.environment"
            yield f"gateway.pinned of {where} lets agents choose another temperature: add temperature to it"
    if learner.publication.quantisation != "none":
        yield f"learner.publication.quantisation={learner.publication.quantisation}: set it to none"


def _of_both(config: "RunConfig") -> Iterator[str]:
    learner = config.learner
    if learner.lora.exists:
        yield f"learner.lora.rank={learner.lora.rank}: engines merge what the learner adds; set it to 0"
    if learner.fp8_matmul:
        yield "learner.fp8_matmul=true: its products are rounded to fp8; set it to false"
    if learner.batch.share_prefixes:
        yield "learner.batch.share_prefixes=true: its attention adds up otherwise; set it to false"
