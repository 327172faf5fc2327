"""Trains again from the log: the groups that the lineage names, read from the replay shards on disk."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

import structlog
from torch import Tensor

from bus.codec import Json
from bus.errors import ConfigError, StorageError
from bus.process.work_progress import tracked
from bus.trajectory import Trajectory
from learner.backends.contract.backend import Backend
from learner.backends.factory import refuse_router_replay
from learner.checkpoint.commit import read_extra
from learner.config.learner import LearnerConfig
from learner.config.lora import LoraConfig
from learner.config.mtp import MtpConfig
from learner.config.process_settings import LearnerSettings
from learner.initial.initial import Initial
from learner.logprobs.frozen_policies import hold_frozen_policies
from learner.logprobs.served_teachers import refuse_other_teachers, teachers_asked
from learner.progress import lineage
from learner.progress.lineage import TrainedStep
from learner.progress.progress import Progress
from learner.run.restore import restore_alone
from learner.step.rl_step import train_on
from storage.disk import checkpoints
from storage.store.replay import ReplayStore, read_groups

log = structlog.get_logger()
Reward = Callable[[Trajectory], float]
NO_OTHER_USES: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrainedStep:
    """A step trained again, beside what the lineage says of it: None where an older build wrote nothing."""

    step: int
    batch_equal: bool | None
    """Says whether the backend got the same batch, bit for bit."""
    loss: float
    recorded_loss: float | None
    grad_norm: float
    recorded_grad_norm: float | None
    entropy: float | None
    """Nats, mean over the trained tokens."""
    skipped: bool
    reward_mean: float

    @property
    def loss_diff(self) -> float:
        """Return the difference between this time and then; 0 when nothing was recorded."""
        return _difference(self.loss, self.recorded_loss)

    @property
    def grad_norm_diff(self) -> float:
        """Return the difference between this time and then; 0 when nothing was recorded."""
        return _difference(self.grad_norm, self.recorded_grad_norm)

    @property
    def differs(self) -> bool:
        """Tell whether the batch differs, or any bit of loss or gradient norm."""
        return self.batch_equal is False or self.loss_diff > 0 or self.grad_norm_diff > 0


def retrain_steps(  # noqa: PLR0913 - each is one choice of what to train again
    settings: LearnerSettings, initial: Initial, stores: Sequence[ReplayStore], *, from_step: int,
    to_step: int, changed: LearnerConfig | None = None, reward: Reward | None = None,
    uses: Mapping[int, int] = NO_OTHER_USES, at_end: Callable[[Backend], None] = lambda backend: None,
) -> Iterator[RetrainedStep]:  # fmt: skip
    """Train steps `from_step` + 1 to `to_step` of a run again, one at each turn of the iterator.

    It starts from the newest checkpoint up to `from_step`, and silently trains what is between; from step 0
    it starts from the initial model and repeats the warm-up. `init_world` comes first.

    Args:
        settings: as the run was trained.
        initial: what it began from, by `learner.initial.initial.prepare`.
        stores: its replay shards, by number, opened for reading; their writer may be at work.
        from_step: the steps after it are compared; 0 is the beginning.
        to_step: the last.
        changed: settings for the steps that are compared, instead of the run's: what if?
        reward: of a trajectory there, instead of the recorded one.
        uses: how often the groups of these leases are trained on in their steps; others once.
        at_end: is called with the backend after the last step.

    Raises `ConfigError` when there is no checkpoint to start from, the lineage lacks a step, or a critic or
    other adapters are wanted than the run has, `StorageError` for groups that are no longer there and for a
    checkpoint that is damaged or of another history."""
    used = changed or settings.learner
    _refuse_other_adapters(settings.learner.lora, used.lora)
    _refuse_other_optimizer(settings.learner.optimizer.matrices, used.optimizer.matrices)
    _refuse_other_computation(settings.learner, used)
    if reward is not None and used.advantage.reward_parts is not None:
        raise ConfigError(
            f"other rewards have no effect with learner.advantage.type={used.advantage.type}, which takes "
            "the parts of the reward that were recorded: name another advantage"
        )
    if used.has_critic and not settings.learner.has_critic:
        raise ConfigError(
            f"learner.advantage.type={used.advantage.type} needs the critic of a run that had one, and this "
            "run had none: compare the two with `launch learner --shadow`"
        )
    refuse_other_teachers(used, settings.model_directory, engine_context=settings.engine_context)
    refuse_router_replay(used, initial.hf_config)
    backend, progress = _begin(settings, initial, from_step)
    if used is not settings.learner and progress.step < from_step:  # the run's own trains what is between
        own, context = settings.learner, settings.engine_context
        refuse_other_teachers(own, settings.model_directory, engine_context=context)
    lines = _lines(settings, progress.step, to_step)
    lineage.refuse_other_groups(settings.lineage, {int(s): g for s, g in progress.groups.items()})
    for recorded in tracked(lines, "training steps again"):
        line = _used(recorded, uses)
        groups = _groups(stores, line)
        if line.step <= from_step:
            _train(backend, progress, settings.learner, line, groups)
            continue
        if changed is not None and line.step == from_step + 1:
            hold_frozen_policies(backend, settings, changed, stage="rl", step=from_step)
        if reward is not None:
            groups = [[replace(t, reward=reward(t)) for t in group] for group in groups]
        yield _train(backend, progress, used, line, groups)
    at_end(backend)


def _refuse_other_optimizer(own: str, wanted: str) -> None:
    if own != wanted:
        raise ConfigError(
            f"learner.optimizer.matrices={wanted}: the run was trained with {own}, and its steps are trained "
            "again from what it saved: leave it as it was, or start a run with the other"
        )


def _refuse_other_adapters(own: LoraConfig, wanted: LoraConfig) -> None:
    names = [name for name in LoraConfig.model_fields if getattr(own, name) != getattr(wanted, name)]
    if names:
        raise ConfigError(
            f"{', '.join(f'learner.lora.{name}={getattr(wanted, name)}' for name in names)}: the run was "
            f"trained with {', '.join(f'{name}={getattr(own, name)}' for name in names)}, and its steps are "
            "trained again from what it saved: leave learner.lora as it was, or start a run with the other"
        )


def _refuse_other_computation(own: LearnerConfig, wanted: LearnerConfig) -> None:
    others = [
        f"learner.{name}={str(getattr(wanted, name)).lower()}"
        for name in ("backend", "quantisation_aware", "fp8_matmul")
        if getattr(wanted, name) != getattr(own, name)
    ]
    others += [
        f"learner.mtp.{name}={getattr(wanted.mtp, name)}"
        for name in MtpConfig.model_fields
        if getattr(wanted.mtp, name) != getattr(own.mtp, name)
    ]
    quantisation = wanted.publication.quantisation
    if wanted.quantisation_aware and quantisation != own.publication.quantisation:
        others.append(f"learner.publication.quantisation={quantisation}")
    if others:
        raise ConfigError(
            f"{', '.join(others)}: steps are trained again by the backend as the run had it: leave it as it "
            "was, or start a run with the other"
        )


def weights_at(settings: LearnerSettings, initial: Initial, step: int) -> dict[str, Tensor] | None:
    """Return the weights in the checkpoint of a step by Hugging Face name; None if there is none."""
    directory = checkpoints.directory(settings.checkpoints, step)
    if step not in checkpoints.steps(settings.checkpoints):
        return None
    progress = Progress.from_json(read_extra(directory))
    return restore_alone(settings, initial, directory, progress).export()


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest difference between two sets of the same weights; 0 if they are equal bit for bit."""
    if one.keys() != other.keys():
        raise ConfigError(f"these are weights of two models: {sorted(one.keys() ^ other.keys())[:3]}")
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def last_step(settings: LearnerSettings) -> int:
    """Return the newest step of the lineage. Raises `ConfigError` when there is none."""
    steps = lineage.steps(settings.lineage)
    if not steps:
        raise ConfigError(f"{settings.lineage} holds no step: nothing was trained yet, or not on this host")
    return max(steps)


def summary(steps: Sequence[RetrainedStep]) -> dict[str, Json]:
    """Return all steps together, then each."""
    compared = [step.batch_equal for step in steps if step.batch_equal is not None]
    return {
        "batches": len(compared),
        "batches_equal": sum(compared),
        "loss_max_abs_diff": max((step.loss_diff for step in steps), default=0.0),
        "grad_norm_max_abs_diff": max((step.grad_norm_diff for step in steps), default=0.0),
        "first_step_that_differs": next((step.step for step in steps if step.differs), None),
        "steps": [asdict(step) for step in steps],
    }


def _begin(settings: LearnerSettings, initial: Initial, step: int) -> tuple[Backend, Progress]:
    root = settings.checkpoints
    while step > 0:
        found = checkpoints.steps(root)
        if not found or found[0] > step:
            raise ConfigError(
                f"no checkpoint up to step {step} in {root}, which holds those of steps {found}: start from "
                "one of them or from step 0; learner.checkpoint.keep is how many a run keeps"
            )
        directory = checkpoints.directory(root, max(s for s in found if s <= step))
        try:
            progress = Progress.from_json(read_extra(directory))
            backend = restore_alone(settings, initial, directory, progress)
        except StorageError:
            if directory.exists():
                raise  # else the run, which goes on, has pruned it meanwhile
        else:
            log.info("retraining_starts", checkpoint=str(directory), step=progress.step)
            return backend, progress
    log.info("retraining_starts", model=str(settings.model_directory), warmup_steps=settings.warmup.steps)
    progress = Progress()
    return restore_alone(settings, initial, None, progress), progress


def _lines(settings: LearnerSettings, after: int, to_step: int) -> list[TrainedStep]:
    steps = lineage.steps(settings.lineage)
    for step in range(after + 1, to_step + 1):
        if step not in steps:
            there = f"steps {min(steps)} to {max(steps)}" if steps else "no step"
            raise ConfigError(f"{settings.lineage} lacks step {step}: it holds {there}")
    return [steps[step] for step in range(after + 1, to_step + 1)]


def _used(line: TrainedStep, uses: Mapping[int, int]) -> TrainedStep:
    weights = line.weights or (1.0,) * len(line.leases)
    given = [pair for pair in zip(line.leases, weights, strict=True) for _ in range(uses.get(pair[0], 1))]
    return replace(line, leases=tuple(lease for lease, _ in given), weights=tuple(w for _, w in given))


def _groups(stores: Sequence[ReplayStore], line: TrainedStep) -> list[list[Trajectory]]:
    try:
        return read_groups(stores, line.leases)
    except StorageError as error:
        raise StorageError(
            f"step {line.step} cannot be trained again: {error}. While the run's storage is stopped, `launch "
            "restore` brings back what was archived"
        ) from error


def _train(
    backend: Backend, progress: Progress, learner: LearnerConfig, line: TrainedStep,
    groups: list[list[Trajectory]],
) -> RetrainedStep:  # fmt: skip
    backend.optimizer_config = learner.optimizer  # read at each step; the optimizer's state stays
    batch, result = train_on(
        backend,
        groups,
        line.weights or [1.0] * len(groups),
        learner,
        step=line.step,
        policy_version=line.policy_version - 1,
        baselines=progress.baselines,
        answers=teachers_asked(groups, learner, vocab_size=backend.hf_config.get_text_config().vocab_size),
    )
    progress.baselines = dict(batch.baselines)
    return RetrainedStep(
        step=line.step,
        batch_equal=None if line.batch_xxh3 is None else batch.xxh3() == line.batch_xxh3,
        loss=result.loss,
        recorded_loss=line.loss,
        grad_norm=result.grad_norm,
        recorded_grad_norm=line.grad_norm,
        entropy=result.diagnostics.get("entropy_nats"),
        skipped=result.skipped,
        reward_mean=batch.reward_mean,
    )


def _difference(now: float, then: float | None) -> float:
    if then is None or now == then or (math.isnan(now) and math.isnan(then)):
        return 0.0
    difference = abs(now - then)
    return math.inf if math.isnan(difference) else difference
