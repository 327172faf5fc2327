"""Settings of the learner, which this module assembles. Loads without torch."""

from itertools import combinations
from math import inf
from typing import Literal, Self

from pydantic import Field, model_validator

from bus.config import Config
from learner.config.advantage import NO_OVERLONG, OVERLONG, AdvantageConfig, GRPOAdvantage, OverlongPenalty
from learner.config.algorithm import (
    NO_ENTROPY_TARGET,
    Aggregation,
    AggregationConfig,
    AutoAggregation,
    EntropyTargetConfig,
    TokenMean,
)
from learner.config.backend import BackendName, refuse_unsupported
from learner.config.batch import BatchConfig
from learner.config.correction import (
    AutoCorrection,
    Correction,
    CorrectionConfig,
    NoCorrection,
    NoRejection,
    Rejection,
    RejectionConfig,
    TokenTIS,
    refuse_two_selections,
)
from learner.config.critic import NO_CRITIC, CriticConfig
from learner.config.diagnostics import DiagnosticsConfig, RecordedLogprobsConfig
from learner.config.frozen_policies import NO_REFERENCE, NO_TEACHER, ReferenceConfig, TeacherConfig
from learner.config.lora import NO_LORA, LoraConfig, refuse_lora
from learner.config.loss import Loss, LossConfig, ReinforceLoss
from learner.config.mtp import NO_MTP, MtpConfig, refuse_mtp
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig, WorldConfig
from learner.config.plugin import NO_HOOK, Choice, HookConfig
from learner.config.publication import PublicationConfig
from storage.settings.weights_transport import LearnerServer


class CheckpointConfig(Config):
    """Sets when the learner's state is saved, and how much of it is kept."""

    save_every: int = Field(50, gt=0)
    """Steps between checkpoints."""
    keep: int = Field(2, gt=0)
    """Number of latest checkpoints that are kept."""


class LearnerConfig(Config):
    """Reinforcement learning."""

    steps: int = Field(1000, ge=0)
    """Upper bound on the optimizer steps; 0 leaves the run at what its `warmup` has trained."""
    target_accuracy: float | None = Field(None, gt=0, le=1)
    """Mean reward of sampled held-out answers at which training stops."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of the learner. `None` is all cores that it may use, shared by the ranks of a host, for a
    model of at least 20 MB on a CPU, and else one."""
    backend: BackendName = "megatron"
    """What holds and trains the model: `megatron` for its own families, with every kind of parallel ranks;
    `fsdp` for any causal language model of transformers, with data parallel ranks that share its weights."""
    loss: LossConfig = ReinforceLoss()
    """Objective of each token."""
    correction: CorrectionConfig = AutoCorrection()
    """Weights of tokens that another policy sampled than the loss takes them to come from. `auto` is token
    TIS at 2.0; without a cap beside `token_range`, `binary_tv`, `binary_kl`, `binary_kl_two_way` and
    `second_moment`, as their papers have it; and none for a loss whose own ratio is to the behaviour policy
    (`ppo_clip` centred there, `aipo`, `cispo`, `clip_cov`, `gmpo`, `gspo`, `kl_cov`, `regression`, `sapo`,
    `topr`, `vespo`)."""
    rejection: RejectionConfig = NoRejection()
    """Tokens and sequences that are too far from the policy to be trained on, whatever the correction. They
    count in the denominators of the aggregation."""
    rejections: dict[str, RejectionConfig] = Field(default_factory=dict)
    """Further rejections by names of your own: a token is trained on where all of them keep it."""
    aggregation: AggregationConfig = AutoAggregation()
    """Sets how the losses of tokens become one number. `auto` is that of the loss's paper: `sequence_mean`
    for `gspo`, `gmpo` and `sapo`, `constant` with `tokens = 1` for `topr` and `regression`. Beside
    `token_range` it is `sequence_mean`, if the loss has none of its own; else it is `token_mean`."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus: each token's loss loses so many times the entropy of its distribution."""
    entropy_target: EntropyTargetConfig = NO_ENTROPY_TARGET
    """Entropy that the bonus aims at, by changing `entropy_coef`, which is then the weight it begins with."""
    advantage: AdvantageConfig = GRPOAdvantage()
    """Sets how rewards become advantages."""
    whiten_advantages: bool = False
    """Subtract the mean of the advantages and divide by their deviation, over the trained tokens of the step
    on all ranks."""
    overlong: OverlongPenalty = NO_OVERLONG
    """Takes from the reward of long answers before it becomes an advantage."""
    reward_hook: HookConfig = NO_HOOK
    """Function that turns the recorded rewards of a step into those that advantages are made of:
    `(groups)` to a reward for each trajectory."""
    before_step: HookConfig = NO_HOOK
    """Function that is called before each step and may change the optimizer's settings for it:
    `(step, groups, optimizer)` to an `OptimizerConfig`, or None. By a parameter `model` it gets the weights,
    which it may change."""
    after_step: HookConfig = NO_HOOK
    """Function that is called after each step with the weights, which it may change: `(step, model)` to
    numbers to record by name, or None."""
    reference: ReferenceConfig = NO_REFERENCE
    """Frozen policy that training stays close to."""
    teacher: TeacherConfig = NO_TEACHER
    """Frozen policy to distil from."""
    critic: CriticConfig = NO_CRITIC
    """Model that predicts rewards, where `learner.advantage.type` is `gae`."""
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Further teachers by names of your own, each for some sources of prompts or for all of them."""
    lora: LoraConfig = NO_LORA
    """Low-rank adapters that are trained instead of the weights, where `rank` is above 0."""
    mtp: MtpConfig = NO_MTP
    """Training of the head for the token after the next, where the model has one."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of reinforcement learning."""
    world: WorldConfig = WorldConfig()
    """Sets how many learner processes there are, and where."""
    parallel: ParallelConfig = UNDIVIDED
    """Sets how the ranks of a torchrun world share the model."""
    batch: BatchConfig = BatchConfig()
    """Sets how trajectories become micro-batches."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Sets when the learner's state is saved, and how much of it is kept."""
    read: Literal["auto", "bus"] = "auto"
    """Sets how trajectories come from their shards: `auto` maps the files of those on the same host and asks
    the others over the bus, `bus` asks all."""
    publish_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the published weights, in which SGLang computes. `auto` is `model.dtype`: engines have the
    weights that the learner computes with. A coarser type is refused."""
    router_replay: Literal["none", "engine", "learner"] = "none"
    """Sets who chooses the experts of a token where the model is a mixture of experts. `none`: the learner's
    own router, in each pass anew. `engine`: the engine that read it, as trajectories record with
    `actors.engine.routed_experts` (R3, arXiv:2510.11370). `learner`: the learner's own router, in a pass
    before the step, for all updates of the step (R2). The router only weighs experts that were chosen."""
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    """Sets when the learner warns of a figure of a step."""
    recorded_logprobs: RecordedLogprobsConfig = RecordedLogprobsConfig()
    """Sets of how many trajectories the learner's log-probs are recorded."""
    publication: PublicationConfig = PublicationConfig()
    """Sets how policy versions reach the actors."""
    quantisation_aware: bool = False
    """Compute with the weights that `learner.publication.quantisation` leaves, as engines do; the gradient
    goes straight through to the weights themselves, which are updated and saved. For a pass, this takes the
    memory of the quantised weights once more."""
    fp8_matmul: bool = False
    """Multiply in fp8 (e4m3, a scale for each row) in the linear layers of the transformer blocks, but for
    the gradients of weights. It needs GPUs from Hopper on and `model.dtype=bfloat16`."""

    @property
    def has_critic(self) -> bool:
        """Tell whether a critic trains beside the policy."""
        return self.advantage.needs_critic or self.critic.train == "always"

    def only_critic_trains(self, step: int) -> bool:
        """Tell whether a step of the run, counted from 1, leaves the policy as it is."""
        return self.has_critic and step <= self.critic.warmup_steps

    @property
    def used_loss(self) -> Loss:
        """Return the loss as configured, with the source of a proximal policy that suits `batch.updates`."""
        if self.loss.facts.proximal != "auto":
            return self.loss
        source = "recomputed" if self.batch.updates > 1 else "first_pass"
        return self.loss.model_copy(update={"proximal": source})

    @property
    def used_teachers(self) -> dict[str, TeacherConfig]:
        """Return the teachers by their tags, under which the weights of those with a `path` are held."""
        named = {f"teacher.{name}": teacher for name, teacher in self.teachers.items()}
        every = {"teacher": self.teacher, **named}
        return {tag: teacher for tag, teacher in every.items() if teacher.exists}

    @property
    def served_teachers(self) -> dict[str, TeacherConfig]:
        """Return the teachers of `used_teachers` that are asked over HTTP."""
        return {tag: teacher for tag, teacher in self.used_teachers.items() if teacher.url is not None}

    @property
    def unseeing_teachers(self) -> str | None:
        """Return what is wrong with served teachers where prompts show images; None where none is served."""
        if not (tags := self.served_teachers):
            return None
        named = ", ".join("learner." + tag.replace("teacher.", "teachers.") for tag in tags)
        return f"{named}: a teacher behind a server is not sent images: give it as a directory (path)"

    @property
    def used_correction(self) -> Correction:
        """Return the correction as configured, or the one that suits the loss and the rejections."""
        if not isinstance(self.correction, AutoCorrection):
            return self.correction
        if self.loss.facts.own_ratio:
            return NoCorrection()
        whole = any(one.whole_ratio for one in self.used_rejections)
        return TokenTIS(truncation_cap=inf) if whole else TokenTIS()

    @property
    def skips_zero_advantages(self) -> bool:
        """Tell whether an update leaves out trajectories whose advantages are all 0: no term of the objective
        gives them a gradient, and nothing else learns from their tokens."""
        others = self.entropy_coef or self.entropy_target.nats is not None or self.reference.kl_coef
        return (
            self.batch.skip_zero_advantages
            and self.loss.facts.zero_without_advantage
            and not (others or self.used_teachers or self.mtp.exists)
        )

    @property
    def used_aggregation(self) -> Aggregation:
        """Return the aggregation as configured, or that of the loss's or rejection's paper."""
        if not isinstance(self.aggregation, AutoAggregation):
            return self.aggregation
        return self._aggregation_of_paper[0] or TokenMean()

    @property
    def _aggregation_of_paper(self) -> tuple[Aggregation | None, str]:
        """Aggregation that the papers state, and which paper: that of the loss, else of the first rejection
        that states one."""
        facts = self.loss.facts
        stated = [(facts.aggregation, facts.paper), *((r.aggregation, r.paper) for r in self.used_rejections)]
        return next((pair for pair in stated if pair[0] is not None), (None, ""))

    @property
    def differences_from_papers(self) -> list[str]:
        """Say what is set otherwise than in the papers of the loss and the rejections, a sentence each."""
        found = []
        (stated, paper), used = self._aggregation_of_paper, self.used_aggregation
        if stated is not None and stated != used:
            found.append(
                f"The aggregation is {_named(used)}, and that of {paper} is {_named(stated)}: leave out "
                f"learner.aggregation if {paper} is what you mean."
            )
        weight = self.used_correction
        whole = weight.is_whole_ratio or self.loss.facts.own_ratio
        return found + [
            f"The correction is {_named(weight)}, and {one.paper} weighs what it keeps by the whole ratio: "
            f"leave out learner.correction if {one.paper} is what you mean."
            for one in self.used_rejections
            if one.whole_ratio and not whole
        ]

    @model_validator(mode="after")
    def _backend_suits_the_rest(self) -> Self:
        if self.backend == "fsdp":
            refuse_unsupported(
                self.parallel,
                self.optimizer,
                self.lora,
                has_critic=self.has_critic,
                share_prefixes=self.batch.share_prefixes,
            )
        if self.batch.share_prefixes and self.parallel.context_min_tokens:
            raise ValueError(
                "learner.batch.share_prefixes=true cuts the line of all segments over context ranks: set "
                "learner.parallel.context_min_tokens=0, or share_prefixes=false"
            )
        if self.batch.share_prefixes and self.parallel.context_attention == "ring":
            raise ValueError(
                "learner.batch.share_prefixes=true needs the keys of all ranks at once: set "
                "learner.parallel.context_attention=gather, or share_prefixes=false"
            )
        refuse_lora(
            self.lora,
            optimizer=self.optimizer.matrices,
            has_critic=self.has_critic,
            reference=self.reference,
            teachers=self.used_teachers,
        )
        refuse_mtp(self.mtp, backend=self.backend, lora=self.lora, parallel=self.parallel, batch=self.batch)
        return self

    @model_validator(mode="after")
    def _each_rank_has_a_port(self) -> Self:
        if isinstance(self.publication.transport, LearnerServer):
            self.publication.transport.of_rank(self.world.processes * self.world.nodes - 1)
        return self

    @model_validator(mode="after")
    def _rounding_is_that_of_engines_or_of_products_alone(self) -> Self:
        if self.quantisation_aware and self.publication.quantisation == "none":
            raise ValueError(
                "learner.quantisation_aware=true has no effect with learner.publication.quantisation=none: "
                "set that to the format in which engines have the weights, as fp8_block"
            )
        if self.quantisation_aware and self.lora.exists:
            raise ValueError(
                f"learner.quantisation_aware=true with learner.lora.rank={self.lora.rank}: engines quantise "
                "what the weights and the adapters make together, which no layer computes with; set the rank "
                "to 0, or quantisation_aware to false"
            )
        if self.fp8_matmul and self.quantisation_aware:
            raise ValueError(
                "learner.fp8_matmul=true with learner.quantisation_aware=true: products in fp8 would round "
                "the weights of engines once more, to those of no engine; set one of them to false"
            )
        if self.fp8_matmul and self.lora.exists:
            raise ValueError(
                f"learner.fp8_matmul=true with learner.lora.rank={self.lora.rank}: layers with adapters do "
                "not multiply in fp8; set the rank to 0, or fp8_matmul to false"
            )
        return self

    @property
    def used_rejections(self) -> tuple[Rejection, ...]:
        """Return the rejections that may leave anything out."""
        configured = (self.rejection, *self.rejections.values())
        return tuple(one for one in configured if not isinstance(one, NoRejection))

    @model_validator(mode="after")
    def _objective_has_an_effect(self) -> Self:
        refuse_two_selections(self.used_rejections)
        if self.loss.facts.own_ratio and self.used_correction != NoCorrection():
            raise ValueError(
                f"learner.correction.type={self.used_correction.type} has no effect with learner.loss.type="
                f"{self.loss.type}, whose own ratio is to the policy that sampled: set it to none, or use "
                "learner.loss.centre=proximal with ppo_clip"
            )
        largest = self.entropy_target.largest_coef
        if self.entropy_target.nats is not None and self.entropy_coef > largest:
            raise ValueError(
                f"learner.entropy_coef={self.entropy_coef} is above learner.entropy_target.largest_coef="
                f"{largest}: lower the first, or raise the second"
            )
        if self.whiten_advantages and self.advantage.whitens:
            raise ValueError(
                f"learner.whiten_advantages=true has no effect with learner.advantage.type="
                f"{self.advantage.type}, which whitens by itself: leave it out"
            )
        updates = self.batch.updates
        if self.loss.facts.proximal == "first_pass" and updates > 1:
            raise ValueError(
                f"learner.loss.proximal=first_pass knows no policy before the step with learner.batch."
                f"updates={updates}, each on trajectories of its own: set it to recomputed or interpolated"
            )
        return self

    @model_validator(mode="after")
    def _one_top_k_teacher_for_each_token(self) -> Self:
        top_k = [(tag, teacher) for tag, teacher in self.used_teachers.items() if teacher.kl == "top_k"]
        for (tag, teacher), (other_tag, other) in combinations(top_k, 2):
            common = sorted(set(teacher.sources) & set(other.sources))
            if common or not (teacher.sources and other.sources):
                raise ValueError(
                    f"the {tag} and the {other_tag} both have kl=top_k and teach "
                    f"{f'the source {common[0]!r}' if common else 'the same trajectories'}, each with tokens "
                    "of its own: give them sources that differ, or one of them kl=sampled"
                )
        return self

    @model_validator(mode="after")
    def _critic_and_rewards_suit_the_advantage(self) -> Self:
        changed = sorted(self.critic.model_dump(exclude_defaults=True))
        if changed and not self.has_critic:
            raise ValueError(
                f"learner.critic.{changed[0]}={getattr(self.critic, changed[0])} has no effect, since "
                f"learner.advantage.type={self.advantage.type} has no critic: set that to gae, or set "
                "learner.critic.train=always"
            )
        overlong = self.overlong.longest_tokens is not None
        kl = self.reference.kl_coef > 0 and self.reference.kl_in == "reward"
        parts, named = self.advantage.reward_parts, f"learner.advantage.type={self.advantage.type}"
        if (overlong or kl) and not self.advantage.takes_negative_rewards:
            raise ValueError(
                f"{named} needs rewards of at least 0, and learner.overlong or "
                "learner.reference.kl_in=reward may make them negative: use kl_in=loss, and no penalty"
            )
        if parts is None:
            return self
        if overlong and OVERLONG not in parts:
            raise ValueError(
                f"learner.overlong has no effect with {named}: give it a weight, as "
                f"learner.advantage.rewards.{OVERLONG}=1.0"
            )
        if self.reward_hook.function is not None:
            raise ValueError(
                f"learner.reward_hook has no effect with {named}, which takes the parts of the reward one by "
                "one: change these in the environment"
            )
        if kl:
            raise ValueError(
                f"learner.reference.kl_in=reward has no effect with {named}, which takes the parts of the "
                "reward one by one: use kl_in=loss"
            )
        return self


def _named(choice: Choice) -> str:
    settings = choice.model_dump(exclude={"type"}, exclude_none=True)
    shown = ", ".join(f"{name}={value}" for name, value in settings.items())
    return f"{choice.type} ({shown})" if shown else choice.type
