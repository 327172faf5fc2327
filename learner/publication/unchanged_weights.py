"""Says why a step left the published weights as they were, as far as it is known."""

from learner.backends.contract.backend import StepResult
from learner.data.batches import StepBatch


def equal_rewards(batch: StepBatch) -> str:
    """Return in words that no answer of a step was better than another; empty where one was."""
    if not batch.groups or batch.equal_groups < batch.groups:
        return ""
    if batch.zero_rewards == batch.trajectories:
        return (
            f"each of the step's {batch.trajectories} rewards was 0, and nothing was learnt from them: the "
            "tasks are too hard for the policy, or the reward does not read its answers"
        )
    return (
        f"the rewards within each of the step's {batch.groups} groups were equal, and nothing was learnt "
        "from them: the tasks are too easy or too hard, or the reward does not tell answers apart"
    )


def why_unchanged(batch: StepBatch, result: StepResult) -> str:
    """Return why a step may have changed no published weight: what is known of it, not what may be."""
    if result.skipped:
        return "the step was skipped: its loss or its gradient was not finite, or no token was trained"
    if result.lr == 0:
        return "the learning rate of the step was 0"
    if equal := equal_rewards(batch):
        return equal
    if result.grad_norm == 0:
        return "the gradient of the step was 0"
    return (
        f"the step had a gradient of norm {result.grad_norm:.3g} and the learning rate {result.lr:.3g}: its "
        "change is too small for what learner.publish_dtype can tell"
    )
