"""Settings of admission: how much is rolled out, how far it may lag, and which groups a step takes."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config


class _Sampling(Config):
    max_reuse: int = Field(1, ge=1)
    """Steps that may train on the same group, within the staleness bound."""
    min_samples_per_insert: float = Field(1.0, gt=0)
    """Average number of steps that train on each group: admission issues no more groups than it allows.
    Below 1 more is generated than trained on; the rest goes stale and is refunded."""
    max_samples_per_insert: float | None = Field(None, gt=0)
    """Upper bound on the steps that train on a stored group, averaged over the run. A step waits rather than
    exceed it. `None` leaves the bound to `max_reuse`."""


class FifoSampler(_Sampling):
    """Takes the oldest groups first and waits for stragglers at their deadline. It uses groups again only if
    too few are fresh."""

    type: Literal["fifo"] = "fifo"


class UniformSampler(_Sampling):
    """Draws any group within the staleness bound, all with equal chance. Groups that are never drawn go stale
    and are refunded."""

    type: Literal["uniform"] = "uniform"


class _Preferring(_Sampling):
    importance_exponent: float = Field(0.5, ge=0, le=1)
    """Exponent of the weight that a drawn group has in the loss, which is proportional to (its chance of
    being in the step)^-exponent: 1 undoes the preference, 0 leaves it as it is."""


class FreshnessSampler(_Preferring):
    """Draws fresh groups more often: each one's chance of being in a step is proportional to
    (1 + staleness)^-exponent, and at most 1."""

    type: Literal["freshness"] = "freshness"
    exponent: float = Field(1.0, ge=0)
    """Strength of the preference; 0 is uniform."""


class PrioritySampler(_Preferring):
    """Draws fresh groups that teach more: each one's chance of being in a step is proportional to
    |advantage|^a * (1 + staleness)^-f, and at most 1."""

    type: Literal["priority"] = "priority"
    advantage_exponent: float = Field(1.0, ge=0)
    """Exponent a of a group's mean |reward - mean reward|; 0 ignores it."""
    freshness_exponent: float = Field(1.0, ge=0)
    """Exponent f of 1 / (1 + staleness); 0 ignores it."""


Sampler = FifoSampler | UniformSampler | FreshnessSampler | PrioritySampler
SamplerConfig = Annotated[Sampler, Field(discriminator="type")]


class EssBrakeConfig(Config):
    """Holds leases back while few tokens carry the updates: data then comes from newer versions."""

    below: float | None = Field(None, gt=0, lt=1)
    """Effective sample size, as a fraction of the tokens (`policy/ess_fraction`), below which a step counts
    as one that brakes. `None` never brakes."""
    steps: int = Field(3, ge=1)
    """Steps in a row below it after which leases are issued for the next step alone, as with a
    `max_staleness` of 0, and steps in a row at or above it after which all are issued again. What is rolling
    out or stored is still trained on."""


NO_ESS_BRAKE = EssBrakeConfig()


class AdmissionConfig(Config):
    """How much is rolled out, how far rollouts may lag, and which groups a step takes."""

    groups_per_step: int = Field(32, ge=1)
    """Groups (prompts) in the batch of one optimizer step."""
    samples_per_prompt: int = Field(8, ge=1)
    """Rollouts of each prompt: the size of a group."""
    max_staleness: int = Field(4, ge=0)
    """Policy versions a trained token may lag behind the learner. 0 is on-policy."""
    ahead: Literal["need", "bound"] = "bound"
    """How many groups are issued ahead of the next step. `bound`: all that `max_staleness` allows. `need`: as
    many of them as keep the learner from waiting or the actors busy, so that data is fresher, with the
    sampler `fifo`, no reuse and staleness that is not exact. `max_staleness` then bounds stragglers alone:
    let it be as many steps as the longest rollout takes, or the learner waits for that one."""
    exact_staleness: bool = False
    """Whether each step waits for all that is issued by then, so that a group is sampled by the version of
    its issue and, with a `fifo` sampler, trained on exactly `max_staleness` versions later. With `max_reuse`
    of r each group is trained on by the r steps of which the last comes so much later. The first steps come
    sooner after version 0. Learner and actors then take turns: it is for measurements of staleness."""
    incomplete: Literal["wait", "drop", "close_short"] = "wait"
    """What happens to an incomplete group that a step cannot go on without. `wait`: the step waits for it as
    long as it takes. `drop`: after `patience_s` it is rejected, counted, and another is issued in its place.
    `close_short`: after `patience_s` the step trains on its stored trajectories if there are at least two,
    else it is dropped. `actors.share_after_s` says when trajectories of an incomplete group are stored."""
    patience_s: float = Field(600.0, gt=0)
    """Time since a group last became complete after which a waiting step drops or closes one. Keep it longer
    than the slowest rollout that is worth its tokens."""
    max_deliver: int = Field(5, ge=3)
    """Actors that a prompt must have ended as their only suspect before it is quarantined: not rolled out
    again.

    A lease becomes a suspect when three actors disappeared with it, or two if its first delivery was handed
    back; an actor runs one suspect at a time. What an actor reports to have ended by a stop, or by another
    prompt, does not count. Neither does a lease that was handed back unread or published again."""
    sampler: SamplerConfig = FifoSampler()
    """Strategy by which a step chooses among the stored groups."""
    ess_brake: EssBrakeConfig = NO_ESS_BRAKE
    """Sets when leases are held back since the trained data is too far from the policy."""

    @model_validator(mode="after")
    def _brake_has_an_effect(self) -> Self:
        if self.ess_brake.below is not None and self.max_staleness == 0:
            raise ValueError(
                f"admission.ess_brake.below={self.ess_brake.below:g} has no effect with "
                "admission.max_staleness=0, which issues leases for the next step alone: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _need_can_be_known(self) -> Self:
        """Refuse settings with which groups that are left over do not tell what the next steps need."""
        sampler = self.sampler
        others = {
            "exact_staleness": (self.exact_staleness, False),
            "sampler.type": (sampler.type, FifoSampler().type),
            "sampler.max_reuse": (sampler.max_reuse, 1),
            "sampler.min_samples_per_insert": (sampler.min_samples_per_insert, 1),
        }
        for name, (value, wanted) in others.items():
            if self.ahead == "need" and value != wanted:
                raise ValueError(
                    f"admission.ahead=need with admission.{name}={value}: what the next steps need is known "
                    f"with {name}={wanted} only; set that, or admission.ahead=bound"
                )
        return self

    @model_validator(mode="after")
    def _staleness_can_be_exact(self) -> Self:
        sampler = self.sampler
        if not self.exact_staleness or sampler.max_reuse == 1:
            return self
        both = f"admission.exact_staleness=true and sampler.max_reuse={sampler.max_reuse}"
        if sampler.type != "fifo":
            raise ValueError(
                f"{both}: sampler.type={sampler.type!r} draws which steps train on a group, so no staleness "
                "is exact; set sampler.type=fifo, or leave out exact_staleness"
            )
        if sampler.min_samples_per_insert != sampler.max_reuse:
            raise ValueError(
                f"{both}: groups would go stale with uses left, since sampler.min_samples_per_insert="
                f"{sampler.min_samples_per_insert:g} lets more be issued; set it to {sampler.max_reuse}"
            )
        return self

    @model_validator(mode="after")
    def _ratios_can_be_kept(self) -> Self:
        least, most = self.sampler.min_samples_per_insert, self.sampler.max_samples_per_insert
        reachable = min(self.sampler.max_reuse, self.max_staleness + 1)
        if least > reachable:
            raise ValueError(
                f"sampler.min_samples_per_insert={least:g} cannot be reached: a group is trained on at most "
                f"{reachable} times, by max_reuse={self.sampler.max_reuse} and max_staleness="
                f"{self.max_staleness}; lower it or raise these"
            )
        if most is not None and most < least:
            raise ValueError(
                f"sampler.max_samples_per_insert={most:g} is below min_samples_per_insert={least:g}: raise it"
            )
        return self
