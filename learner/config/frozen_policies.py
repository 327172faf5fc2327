"""Configuration of the frozen policies beside the trained one; loads without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from bus.config import Config, HttpUrl
from bus.errors import ConfigError


class ReferenceConfig(Config):
    """A frozen policy that the trained one is kept near, by its KL divergence from it. Its weights lie in
    main memory and take the model's place for one pass without gradients a step."""

    kl_coef: float = Field(0.0, ge=0)
    """Weight of the divergence in nats; 0 does without a reference."""
    kl_estimator: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """Sets how a sampled token tells the divergence, with r = log(policy / reference): k1 = r, k2 = r^2 / 2,
    k3 = exp(-r) - 1 + r, low_var_kl is k3 cut off at 10 nats. In the loss k1 has a mean gradient of 0."""
    kl_in: Literal["loss", "advantage", "reward"] = "loss"
    """A term of the loss, a penalty on each token's advantage, or one on the reward before it becomes an
    advantage. In the reward the policy is the one that sampled."""
    kl_unbiased: bool = False
    """Multiply the KL term of the loss by the importance ratio to the policy that sampled, as DeepSeek-V3.2
    does."""
    path: Path | None = None
    """Hugging Face directory of the reference, a model of the same architecture and vocabulary. Without it
    the policy that this stage begins with is the reference."""
    refresh_every: int | None = Field(None, gt=0)
    """Steps after which the policy as it then is becomes the reference, again and again."""

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        for name, value in (("path", self.path), ("refresh_every", self.refresh_every)):
            if value is not None and self.kl_coef == 0:
                raise ValueError(
                    f"reference.{name}={value} needs reference.kl_coef above 0 (0.001 is a good start): "
                    "without it there is no reference"
                )
        if self.kl_unbiased and self.kl_in != "loss":
            raise ValueError(
                "reference.kl_unbiased=true needs reference.kl_in=loss: advantages have the importance ratio "
                "of the loss already"
            )
        return self


NO_REFERENCE = ReferenceConfig()
SERVED_ONLY = ("concurrency", "timeout_s", "outage_s")
"""Settings of a teacher that only one with a `url` has."""
MOST_TOP_K = 64
"""Most tokens of a teacher's distribution: the learner keeps 8 bytes of each for every token of a step."""


class TeacherConfig(Config):
    """On-policy distillation: a frozen policy that the trained one is drawn to where it samples."""

    path: Path | None = None
    """Hugging Face directory of the teacher, a model of the same architecture and vocabulary. Without it
    and `url` there is none."""
    url: HttpUrl | None = None
    """Address of an SGLang server of the teacher, as http://host:port, instead of `path`: any model with the
    policy's tokenizer, such as a larger one, which takes no memory of the learner. SGLang scores at
    temperature 1, so `sampling.temperature` must be 1."""
    concurrency: int = Field(32, ge=1)
    """With `url`: most requests of one data-parallel rank that are on their way at the same time."""
    timeout_s: float = Field(300.0, gt=0)
    """With `url`: longest time that one request may take before it counts as failed and is repeated."""
    outage_s: float = Field(600.0, gt=0)
    """With `url`: time for which requests are repeated while the server is away. The learner ends with an
    error after it."""
    coef: float = Field(1.0, gt=0)
    """Each token's advantage loses so many times log(policy / teacher), in nats; with `kl = "top_k"` its loss
    gains so many times the divergence."""
    kl: Literal["sampled", "top_k"] = "sampled"
    """Look at the sampled token alone, or at the `top_k` tokens that the teacher finds likeliest in its place
    and all others together, through which the loss has its gradient."""
    top_k: int | None = Field(None, ge=1, le=MOST_TOP_K)
    """Number of the tokens of `kl = "top_k"`, which needs it."""
    direction: Literal["reverse", "forward"] = "reverse"
    """With `kl = "top_k"`: KL(policy || teacher), which leaves out what the teacher would not say, or
    KL(teacher || policy), which covers all that it might."""
    sources: tuple[str, ...] = ()
    """Values of the entry `source` of a prompt's metadata whose trajectories it teaches; none stands for
    all trajectories."""

    def teaches(self, source: str) -> bool:
        return not self.sources or source in self.sources

    @property
    def exists(self) -> bool:
        return self.path is not None or self.url is not None

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        if self.url is None:
            for name in SERVED_ONLY:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name}={getattr(self, name)} has no effect without url, the address of a server: "
                        "set that as well, or leave it out"
                    )
        elif self.path is not None:
            raise ValueError(
                f"path={self.path} and url={self.url} are two teachers: leave out one of them, or name the "
                "other in learner.teachers"
            )
        if self.kl == "top_k" and self.top_k is None:
            raise ValueError("kl=top_k needs the number of tokens: set top_k as well (16 is a good start)")
        if self.kl == "top_k" and not self.exists:
            raise ValueError("kl=top_k needs a teacher: set path or url as well")
        if self.kl == "sampled" and (self.top_k is not None or self.direction != "reverse"):
            raise ValueError(
                f"top_k={self.top_k} and direction={self.direction} have no effect with kl=sampled: set "
                "kl=top_k, or leave them out"
            )
        if self.sources and not self.exists:
            raise ValueError(f"sources={list(self.sources)} needs a teacher: set path or url as well")
        return self


NO_TEACHER = TeacherConfig()


def teacher_settings(tag: str) -> str:
    """Return where the settings of the teacher of this tag are: `teacher.math` is `learner.teachers.math`."""
    return f"learner.{tag.replace('teacher.', 'teachers.', 1)}"


def refuse_other_sampling(
    served: Mapping[str, TeacherConfig], *, temperature: float, keep_masks: bool
) -> None:
    """Raise `ConfigError` where actors sample from another distribution than teachers behind servers score.

    Args:
        served: those teachers, by their tags.
        temperature: of the actors' sampling.
        keep_masks: they record which tokens were kept, and the policy's log-probs are among these."""
    for tag, teacher in served.items():
        if temperature != 1:
            raise ConfigError(
                f"{teacher_settings(tag)}.url needs sampling.temperature=1, which is {temperature:g}: SGLang "
                "scores at temperature 1 only; set it so, or name the teacher's directory with path"
            )
        if keep_masks and teacher.kl == "sampled":
            raise ConfigError(
                f"{teacher_settings(tag)}.url with kl=sampled and sampling.keep_masks=true: SGLang "
                "scores with the whole vocabulary only; set keep_masks=false, or kl=top_k"
            )
