"""Settings of low-rank adapters, which are trained instead of the weights themselves. Loads without torch."""

from collections.abc import Mapping
from math import sqrt
from typing import Literal

from pydantic import Field, JsonValue

from bus.config import Config
from learner.config.frozen_policies import ReferenceConfig, TeacherConfig, teacher_settings


class LoraConfig(Config):
    """Low-rank adapters (LoRA, arXiv:2106.09685) on linear layers; all weights of the model are frozen.

    A layer of the weight W computes with W + scale * B A, where A has `rank` rows and B as many columns.
    B begins as 0, so that the policy begins as the model."""

    rank: int = Field(0, ge=0)
    """Rows of A and columns of B; 0 trains the weights themselves, without adapters."""
    alpha: float = Field(32.0, gt=0)
    """Numerator of the scale, which is `alpha / rank`."""
    rank_stabilised: bool = False
    """Let the scale be `alpha / sqrt(rank)` (rsLoRA, arXiv:2312.03732), which keeps the size of a layer's
    change as the rank grows."""
    weight_decomposed: bool = False
    """Train the length of each row of a layer's weight apart from its direction (DoRA, arXiv:2402.09353):
    a row of W + scale * B A is scaled to the length `magnitude`, which begins as that of the row of W."""
    targets: tuple[str, ...] = ()
    """Ends of the names of the linear layers that have an adapter, as `q_proj` or `layers.0.mlp.up_proj`;
    none stands for all linear layers of the transformer blocks, those of routed experts only with
    `experts`. Routers and gates of shared experts have none."""
    experts: bool = False
    """Give routed experts of a mixture adapters too, one for each projection of each expert. Shared experts
    have adapters without this, as dense layers do."""
    publish: Literal["adapter", "merged"] = "adapter"
    """`adapter`: the frozen weights are published once, then A and B alone, which actors add to them.
    `merged`: whole weights are published, as without adapters."""

    @property
    def exists(self) -> bool:
        return self.rank > 0

    def is_as(self, other: "LoraConfig") -> bool:
        """Tell whether checkpoints of both have the same adapters."""
        return saved_settings(self) == saved_settings(other)

    @property
    def scale(self) -> float:
        return self.alpha / (sqrt(self.rank) if self.rank_stabilised else self.rank)


NO_LORA = LoraConfig()


def saved_settings(config: LoraConfig) -> dict[str, JsonValue]:
    """Return the settings that must be the same where adapters are loaded from a checkpoint."""
    return config.model_dump(mode="json", exclude={"publish"})


def refuse_lora(
    lora: LoraConfig, *, optimizer: str, has_critic: bool, reference: ReferenceConfig,
    teachers: Mapping[str, TeacherConfig],
) -> None:  # fmt: skip
    """Raise `ValueError` for settings beside which there are no adapters, and for adapters of rank 0."""
    if not lora.exists:
        if changed := sorted(lora.model_dump(exclude_defaults=True)):
            raise ValueError(
                f"learner.lora.{changed[0]}={getattr(lora, changed[0])} has no effect with "
                "learner.lora.rank=0: set the rank (16 is a good start), or leave it out"
            )
        return
    where = f"learner.lora.rank={lora.rank}"
    if optimizer != "adamw":
        raise ValueError(
            f"{where} with learner.optimizer.matrices={optimizer}, which is for whole matrices: set it to "
            "adamw, or the rank to 0"
        )
    if has_critic:
        raise ValueError(
            f"{where} with a critic, which is trained as a whole: use an advantage without one, and leave "
            "learner.critic.train alone; or set the rank to 0"
        )
    if reference.path is not None:
        raise ValueError(
            f"{where} with learner.reference.path={reference.path}: the reference is the policy with the "
            "adapter as it was when reinforcement learning began, beside the same weights; leave the path "
            "out, or set the rank to 0"
        )
    for tag, teacher in teachers.items():
        if teacher.path is not None:
            raise ValueError(
                f"{where} with {teacher_settings(tag)}.path={teacher.path}: a teacher in the policy's place "
                "would need whole weights beside those that are frozen; serve it and name its url, or set "
                "the rank to 0"
            )
