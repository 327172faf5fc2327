"""A group as witness: the weights tell how often it was trained on.

Its step is trained again, and those after it up to the next checkpoint: with the group once, not at all, and
twice. The weights in that checkpoint are compared with the three results. So what the ledger and the lineage
say of the group is held against what training has left in the weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bus.errors import ConfigError
from bus.topology import shard_of
from learner.backends.contract.backend import Backend
from learner.config.process_settings import LearnerSettings
from learner.history.retrain import largest_difference, retrain_steps, weights_at
from learner.initial.initial import Initial
from learner.progress import lineage
from storage.disk import checkpoints
from storage.store.replay import ReplayStore

Times = Literal["once", "never", "twice"]
USES: dict[Times, int] = {"once": 1, "never": 0, "twice": 2}
CLEARLY = 0.1
"""The nearest of the three counts only within this part of the distance to the next nearest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Witness:
    """Says what the weights tell of one group."""

    lease: int
    step: int
    """The step that trained on the group."""
    checkpoint: int
    """Step of the checkpoint whose weights were looked at."""
    differences: dict[Times, float]
    """Largest difference of any weight in the checkpoint, to where the group was trained on so often."""

    @property
    def trained(self) -> Times | Literal["not clear"]:
        """Return how often the weights say that the group was trained on."""
        nearest, second = sorted(self.differences, key=lambda times: self.differences[times])[:2]
        if self.differences[nearest] <= CLEARLY * self.differences[second] < self.differences[second]:
            return nearest
        return "not clear"


def witness(
    settings: LearnerSettings, initial: Initial, stores: Sequence[ReplayStore], lease: int
) -> Witness:
    """Return what the weights tell of the group of `lease`. `init_world` comes first.

    Raises `ConfigError` when no step that led to a checkpoint trained on it, and what
    `learner.history.retrain.retrain_steps` raises."""
    step, checkpoint = _step_of(settings, lease)
    then = weights_at(settings, initial, checkpoint)
    if then is None:
        raise ConfigError(f"the checkpoint of step {checkpoint} was pruned meanwhile: try again")
    saved = min(checkpoints.steps(settings.checkpoints))
    from_step = step - 1 if saved < step else 0  # of step 0 there is always the initial model
    differences: dict[Times, float] = {}
    for times, uses in USES.items():

        def compare(backend: Backend, times: Times = times) -> None:
            differences[times] = largest_difference(backend.export(), then)

        for _ in retrain_steps(
            settings, initial, stores,
            from_step=from_step, to_step=checkpoint, uses={lease: uses}, at_end=compare,
        ):  # fmt: skip
            pass
    return Witness(lease=lease, step=step, checkpoint=checkpoint, differences=differences)


def newest_witness(settings: LearnerSettings, stores: Sequence[ReplayStore]) -> int:
    """Return the newest group in a checkpoint that taught the weights something: its rewards differ."""
    steps, saved = lineage.steps(settings.lineage), checkpoints.steps(settings.checkpoints)
    leases = [
        lease
        for step in sorted(steps, reverse=True)
        if step <= max(saved, default=0)
        for lease in steps[step].leases
    ]
    for lease in leases:
        rewards = {trajectory.reward for trajectory in stores[shard_of(lease, len(stores))].read([lease])}
        if len(rewards) > 1:
            return lease
    raise ConfigError(
        f"{settings.checkpoints} has no step of {settings.lineage} with a group of differing rewards"
    )


def _step_of(settings: LearnerSettings, lease: int) -> tuple[int, int]:
    steps = lineage.steps(settings.lineage)
    step = next((n for n, line in steps.items() if lease in line.leases), None)
    if step is None:
        raise ConfigError(f"lease {lease} was not trained on, says {settings.lineage}")
    saved = [n for n in checkpoints.steps(settings.checkpoints) if n >= step]
    if not saved:
        raise ConfigError(
            f"lease {lease} was trained on in step {step}, and there is no checkpoint of a step after it yet"
        )
    return step, min(saved)
