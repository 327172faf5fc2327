"""Settings that do not go with exact arithmetic."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from actors.engines.config import inexact
from bus.errors import ConfigError
from storage.numerics_limits import MOST_TOKENS

if TYPE_CHECKING:
    from launch.config import RunConfig
    from learner.config.learner import LearnerConfig


def check_numerics(config: "RunConfig") -> None:
    """Raise `ConfigError` with all settings by which exact arithmetic would not be exact."""
    if config.model.numerics == "exact" and (problems := list(_problems(config))):
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise ConfigError(f"model.numerics=exact needs other settings; set it to fast, or:\n{listed}")


def _problems(config: "RunConfig") -> Iterator[str]:
    if config.model.dtype != "float32":
        yield f"model.dtype={config.model.dtype}: set it to float32"
    if problem := inexact(config.actors.engine):
        yield problem
    if config.sampling.max_new_tokens >= MOST_TOKENS:
        yield (
            f"sampling.max_new_tokens={config.sampling.max_new_tokens}: exact sums take at most "
            f"{MOST_TOKENS} tokens of prompt and answer together; lower it"
        )
    yield from _of_learner(config.learner)


def _of_learner(learner: "LearnerConfig") -> Iterator[str]:
    if learner.publish_dtype != "float32":
        yield f"learner.publish_dtype={learner.publish_dtype}: engines would get rounded weights; set float32"
    if learner.lora.exists:
        yield f"learner.lora.rank={learner.lora.rank}: engines merge what the learner adds; set it to 0"
    if learner.publication.quantisation != "none" and not learner.quantisation_aware:
        yield (
            f"learner.publication.quantisation={learner.publication.quantisation}: set it to none, or "
            "learner.quantisation_aware to true, with which the learner computes with the same weights"
        )
    if learner.fp8_matmul:
        yield "learner.fp8_matmul=true: its products are rounded to fp8; set it to false"
    for name in ("tensor", "pipeline", "virtual_pipeline", "context"):
        if (ranks := getattr(learner.parallel, name)) > 1:
            yield f"learner.parallel.{name}={ranks}: ranks would share sums; set it to 1"
    if learner.batch.share_prefixes:
        yield "learner.batch.share_prefixes=true: its attention adds up otherwise; set it to false"
