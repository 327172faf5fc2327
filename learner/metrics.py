"""Names of the learner's numbers, `area/name_unit`, as metrics.jsonl and every screen know them."""

from collections.abc import Mapping

from bus.codec import Json
from learner.backends.base import StepResult
from learner.data.batches import StepBatch


def step_values(result: StepResult) -> dict[str, Json]:
    """Return what an optimizer step did."""
    return {
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/lr": result.lr,
        "train/response_tokens": result.tokens,
        "train/skipped": result.skipped,
        **{f"policy/{name}": value for name, value in result.diagnostics.items()},
    }


def batch_values(batch: StepBatch) -> dict[str, Json]:
    """Return what it trained on."""
    return {
        "reward/mean": batch.reward_mean,
        "staleness/max_versions": batch.staleness_max,
        "staleness/mean_versions": batch.staleness_mean,
        "staleness/queued_mean_versions": batch.queued_mean,
        "staleness/generation_mean_versions": batch.staleness_mean - batch.queued_mean,
        "rollout/completed_fraction": batch.completed / max(1, batch.trajectories),
        "rollout/cut_off_fraction": batch.cut_off_tokens / max(1, batch.response_tokens),
        "train/trajectories": batch.trajectories,
        "train/tokens": batch.tokens,
        "train/untrainable_trajectories": batch.untrainable,
        "train/untrusted_trajectories": batch.untrusted,
        "train/response_tokens_mean": batch.response_tokens_mean,
    }


def read_values(read: Mapping[str, int]) -> dict[str, Json]:
    """Return how many trajectories rank 0 has read so far, and how many bytes of tokens, by each way."""
    ways = ("mapped", "mapped_bytes", "bus", "bus_bytes")
    return {f"replay/read_{way}": read.get(way, 0) for way in ways}
