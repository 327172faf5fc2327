"""One step of reinforcement learning on the groups it was given: the same for whoever trains on them."""

from collections.abc import Sequence

from bus.messages import Trajectory
from bus.requests import GroupRef
from learner.batches import StepBatch, make_step_batch
from learner.config import LearnerConfig
from learner.data_parallel import of_all_ranks
from learner.lineage import TrainedStep
from learner.trainer import StepResult, Trainer

Groups = Sequence[Sequence[Trajectory]]


def train_on(
    trainer: Trainer, groups: Groups, weights: Sequence[float], learner: LearnerConfig, *,
    policy_version: int, temperature: float,
) -> tuple[StepBatch, StepResult]:  # fmt: skip
    """Update the weights, which are of `policy_version`, on these groups with their importance weights.

    Of several ranks each gives its own groups; the batch's counts and the result are those of all.
    """
    batch = of_all_ranks(
        make_step_batch(
            groups,
            weights=weights,
            policy_version=policy_version,
            advantage=learner.advantage,
            batch=learner.batch,
        )
    )
    result = trainer.train_step(
        batch.micro_batches, learner.loss, temperature=temperature, policy_version=policy_version
    )
    return batch, result


def lineage_line(
    step: int, policy_version: int, incarnation: str, groups: Sequence[GroupRef], batch: StepBatch,
    result: StepResult,
) -> TrainedStep:  # fmt: skip
    """What the lineage keeps of a step that made `policy_version`; `groups` are those of all ranks."""
    return TrainedStep(
        step=step,
        policy_version=policy_version,
        incarnation=incarnation,
        leases=tuple(group.lease_id for group in groups),
        weights=tuple(group.weight for group in groups),
        batch_xxh3=batch.xxh3(),
        loss=result.loss,
        grad_norm=result.grad_norm,
        entropy=result.diagnostics.get("entropy_nats"),
        lr=result.lr,
        skipped=result.skipped,
    )
