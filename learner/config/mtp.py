"""Settings of the head that predicts the token after the next (multi-token prediction). Loads without
torch."""

from pydantic import Field

from bus.config import Config
from bus.errors import ConfigError
from learner.config.backend import BackendName
from learner.config.batch import BatchConfig
from learner.config.lora import LoraConfig
from learner.config.parallel import ParallelConfig

HEADED = ("deepseek_v3", "glm4_moe", "qwen3_next")
"""Families, by `model_type`, whose models may have such a head, of one sparse layer. Where the configuration
does not count heads, as Qwen3-Next's, there is one."""


class MtpConfig(Config):
    """Training of the model's head for the token after the next (MTP, arXiv:2412.19437, section 2.2), with
    which engines draft.

    It learns beside the policy, from the sampled tokens of each step, and changes nothing of the policy: no
    gradient leaves the head, whose embedding and output layer are the policy's, and its gradient is clipped
    by itself.
    """

    weight: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Factor of the head's loss, the mean cross entropy of its tokens; 0 leaves the head as it came. AdamW
    hardly sees it, since it scales each gradient to the same size: `lr_factor` changes how far the head
    moves."""

    lr_factor: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Learning rate of the head over that of the policy."""

    @property
    def exists(self) -> bool:
        """Tell whether the head is trained."""
        return self.weight > 0


NO_MTP = MtpConfig()


def refuse_headless(mtp: MtpConfig, model_type: str, heads: int) -> None:
    """Raise `ConfigError` where a head is to be trained that a model with so many heads does not have."""
    if mtp.exists and (model_type not in HEADED or heads != 1):
        raise ConfigError(
            f"learner.mtp.weight={mtp.weight}: the model, a {model_type} with num_nextn_predict_layers="
            f"{heads}, has no head that can be trained: set the weight to 0, or take a model of "
            f"{' or '.join(HEADED)} with one"
        )


def refuse_mtp(
    mtp: MtpConfig, *, backend: BackendName, lora: LoraConfig, parallel: ParallelConfig, batch: BatchConfig
) -> None:
    """Raise `ValueError` for settings beside which no head is trained, and for a head that is not trained."""
    if not mtp.exists:
        if changed := sorted(mtp.model_dump(exclude_defaults=True)):
            raise ValueError(
                f"learner.mtp.{changed[0]}={getattr(mtp, changed[0])} has no effect with "
                "learner.mtp.weight=0: set the weight (0.2 is a good start), or leave it out"
            )
        return
    where, off = f"learner.mtp.weight={mtp.weight}", "or the weight to 0"
    if backend != "megatron":
        raise ValueError(
            f"{where} with learner.backend={backend}, which leaves the head out: set megatron, {off}"
        )
    if lora.exists:
        raise ValueError(
            f"{where} with learner.lora.rank={lora.rank}, which freezes every weight: set the rank to 0, "
            f"{off}"
        )
    if parallel.pipeline > 1 and not parallel.distributed_optimizer:
        raise ValueError(
            f"{where} with learner.parallel.pipeline={parallel.pipeline} and distributed_optimizer=false: "
            "the last stage alone has the head's experts, which megatron-core cannot resume so; set "
            f"distributed_optimizer=true, {off}"
        )
    if batch.share_prefixes:
        raise ValueError(
            f"{where} with learner.batch.share_prefixes=true: the head reads the next token too, which "
            f"differs where trajectories part; set share_prefixes=false, {off}"
        )
