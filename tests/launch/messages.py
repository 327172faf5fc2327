"""Tells tests what the processes of a run say."""

from dataclasses import replace

from bus.codec import Json
from bus.evaluation_messages import EvaluationResult
from bus.messages import Metrics, Status
from launch.run_view.monitor import RunMonitor, RunSettings
from launch.run_view.run_status import RunState

MIB = 1 << 20
FACTS = RunSettings(
    name="demo", steps=400, warmup_steps=100, max_staleness=4, samples_per_prompt=8, target_accuracy=0.9
)


def state_of(*statuses: Status, name: str = "test", asked_s: float = 0.0) -> RunState:
    """A run of which these were heard a moment ago."""
    monitor = RunMonitor(replace(FACTS, name=name))
    for status in statuses:
        monitor.on_status(status)
    return RunState(monitor, asked_s)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now_s = 100.0
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return self.now_s


def learner(
    *,
    stage="rl",
    step=20,
    pid=1,
    doing="training step 21",
    wait="",
    reason="",
    rss=1000 * MIB,
    **values: Json,
) -> Status:
    known: dict[str, Json] = {
        "stage": stage,
        "step": step,
        "warmup_step": 100,
        "policy_version": step + 1 if stage != "warmup" else 0,
        "trajectories_trained": step * 256,
        "max_staleness_seen": 3,
        "trained_tokens_per_s": 3210.0,
    }
    return Status(
        source="learner", role="learner", doing=doing, wait=wait, reason=reason, pid=pid, peak_rss_bytes=rss,
        values=known | values,
    )  # fmt: skip


def actor(n=0, *, doing="generating", wait="", rss=300 * MIB, not_storing=(), **values: Json) -> Status:
    known: dict[str, Json] = {
        "running": 30,
        "waiting": 3,
        "generated_tokens_per_s": 4321.0,
        "policy_version": 21,
        "trajectories": 640,
    }
    pid = 1000 + n
    return Status(
        source=f"actor-host-{pid}", role="actor", doing=doing, wait=wait, pid=pid, peak_rss_bytes=rss,
        not_storing=not_storing, values=known | values,
    )  # fmt: skip


def storage(**values: Json) -> Status:
    known: dict[str, Json] = {
        "issued": 806,
        "rolling_out": 64,
        "rejected": 90,
        "stored": 12,
        "trained": 640,
        "reasons": {"zero_variance": 84, "rollout_failed": 6},
        "trajectories_stored": 5216,
        "stored_bytes": 12 * MIB,
        "tasks_pending": 31,
        "trajectories_pending": 2,
        "dead": 0,
        "max_staleness": 4,
    }
    return Status(
        source="storage", role="storage", doing="all that the bound allows is rolling out", wait="staleness",
        pid=2, peak_rss_bytes=200 * MIB, values=known | values,
    )  # fmt: skip


def metrics(step, *, reward=0.5, time_s=None, stage="rl", **values: Json) -> Metrics:
    known: dict[str, Json] = {
        "train/stage": stage,
        "train/policy_version": step + 1,
        "reward/mean": reward,
        "staleness/mean_versions": 0.5,
        "staleness/max_versions": 2,
        "time/step_s": 2.0,
        "time/waiting_for_batch_s": 0.4,
        "time/publish_stall_s": 0.1,
    }
    at = 1000.0 + step if time_s is None else time_s
    return Metrics(source="learner", step=step, time_s=at, values=known | values)


def evaluation(
    version, sampled, greedy=None, *, drawn_by=None, failed=0, data_set="", scores=()
) -> EvaluationResult:
    greedy = sampled if greedy is None else greedy
    oldest, newest = drawn_by or (version, version)
    return EvaluationResult(
        policy_version=version, incarnation="a", sampled=sampled, greedy=greedy, prompts=200, seconds=3.0,
        oldest_version=oldest, newest_version=newest, failed=failed,
        data_set=data_set, scores=dict(scores),
    )  # fmt: skip
