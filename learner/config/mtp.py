"""Settings of the head that predicts the token after the next (multi-token prediction). Loads without
torch."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from pydantic import Field

from bus.config import Config
from bus.errors import ConfigError
from learner.config.backend import BackendName
from learner.config.batch import BatchConfig
from learner.config.lora import LoraConfig
from learner.config.parallel import ParallelConfig
from storage.model_files.families import families_with, family_named

OWN_EMBEDDING = "mtp_use_dedicated_embeddings"
"""Field of a configuration that says that its head does not read the model's embedding."""
_LAYER_OF_HEAD = re.compile(r"mtp\.layers\.(\d+)\.")


class MtpConfig(Config):
    """Training of the model's head for the token after the next (MTP, arXiv:2412.19437, section 2.2), with
    which engines draft.

    It learns beside the policy, from the sampled tokens of each step, and changes nothing of the policy: no
    gradient leaves the head, whose embedding and output layer are the policy's, and its gradient is clipped
    by itself."""

    weight: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Factor of the head's loss, the mean cross entropy of its tokens; 0 leaves the head as it came. AdamW
    hardly sees it, since it scales each gradient to the same size: `lr_factor` changes how far the head
    moves."""
    lr_factor: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Learning rate of the head over that of the policy."""

    @property
    def exists(self) -> bool:
        return self.weight > 0


NO_MTP = MtpConfig()


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What a model says of its heads for several next tokens."""

    model_type: str
    counted: str
    """Says how many there are, and where that is said."""
    is_one: bool
    own_embedding: bool
    """Says that the heads have an embedding that is not the model's."""
    lost: str = ""
    """Begins the names of their weights where files have none of these; empty where some are there, or nobody
    knows."""

    @classmethod
    def of(cls, described: Mapping[str, object], names: Collection[str] | None) -> Self:
        """Read what a configuration and the `names` of the weights say, which count heads where it does not;
        with None nobody knows the names, and there is one head."""
        kind = str(described.get("model_type"))
        family = family_named(kind)
        field = family.heads_counted_in or "num_nextn_predict_layers"
        count = described.get(field, 1 if family.one_head_by_default else None) or 0
        counted = f"{field}={count}"
        if family.heads_counted_in and not family.one_head_by_default and described.get(field) is None:
            names = ("mtp.layers.0.",) if names is None else names
            found = (_LAYER_OF_HEAD.match(name) for name in names)
            count = len({layer[1] for layer in found if layer})
            counted = f"{count} layers `mtp.layers.*` in its files"
        begins = _begins(kind, described)
        return cls(
            model_type=kind,
            counted=counted,
            is_one=count == 1,
            own_embedding=bool(described.get(OWN_EMBEDDING)),
            lost="" if names is None or any(name.startswith(begins) for name in names) else begins,
        )


def _begins(model_type: str, described: Mapping[str, object]) -> str:
    """Return how the names of a head's weights begin in files: of a layer behind the last, or its own with
    Qwen. Empty, as any name begins, where the configuration does not tell."""
    if not family_named(model_type).one_head_by_default:
        return "mtp."
    layers = described.get("num_hidden_layers")
    return "" if layers is None else f"model.layers.{layers}."


def refuse_headless(mtp: MtpConfig, heads: Heads) -> None:
    """Raise `ConfigError` where a head is to be trained that the model or its files do not have, or that does
    not read the model's embedding."""
    if not mtp.exists:
        return
    where = f"learner.mtp.weight={mtp.weight}: the model, a {heads.model_type}"
    if not family_named(heads.model_type).heads_counted_in or not heads.is_one:
        raise ConfigError(
            f"{where} with {heads.counted}, has no head that can be trained: set the weight to 0, or take a "
            f"model of {' or '.join(families_with(lambda family: family.heads_counted_in))} with one"
        )
    if heads.own_embedding:
        raise ConfigError(
            f"{where} with {OWN_EMBEDDING}=true, has a head with an embedding of its own, which is not "
            "supported: set the weight to 0"
        )
    if heads.lost:
        raise ConfigError(
            f"{where} with {heads.counted}, has no weights of a head in its files ({heads.lost}): set the "
            "weight to 0, or take files that have them"
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
