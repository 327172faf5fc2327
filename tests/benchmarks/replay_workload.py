"""Tells what the measurements of storage have in common: how much of what, and how long it takes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bus.codec import Json
from bus.messages import group_name
from bus.trajectory import Trajectory, Turn
from storage.store.segments import TOKEN_ARRAYS

GROUP = 8
TOKENS = 1900
"""Median length; lengths are log-normal, as those of rollouts are."""
SHORT = 16
"""Tokens of a trajectory where the count matters and not the bytes: any fixed cost shows most."""
Figures = dict[str, Json]


@dataclass(frozen=True)
class Size:
    """Says how much is measured."""

    rounds: int
    written: int
    """Trajectories a segment of the write comparison."""
    stored: int
    """Trajectories in the store of the read comparison."""
    many: int
    """Trajectories in the large store."""
    messages: int
    """Groups sent through the shard."""
    leases: int
    """Leases that go all the way from their issue to the commit of their step."""


class Material:
    """Token arrays of many trajectories, back to back, as a memory map holds them."""

    def __init__(self, count: int, tokens: int) -> None:
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(np.log(tokens), 0.35, count), 2, 8 * tokens).astype(np.int64)
        self.ends = np.cumsum(lengths)
        self.begins = self.ends - lengths
        total = int(self.ends[-1])
        self.arrays: dict[str, NDArray[np.generic]] = {
            "token_ids": rng.integers(0, 150_000, total, dtype=np.int32),
            "policy_versions": np.ones(total, np.int32),
            "behaviour_logprobs": -rng.random(total, dtype=np.float32),
            "loss_mask": np.ones(total, np.bool_),
        }
        self.size_bytes = sum(array.nbytes for array in self.arrays.values())

    def __len__(self) -> int:
        return len(self.ends)

    def trajectory(self, row: int, number: int, group: int = GROUP) -> Trajectory:
        """Return the tokens of `row` as the run's `number`-th trajectory, in groups of so many."""
        lease_id, sample = divmod(number, group)
        part = slice(int(self.begins[row]), int(self.ends[row]))
        return Trajectory(
            trajectory_id=f"{group_name(lease_id)}.{sample}",
            group_id=group_name(lease_id),
            lease_id=lease_id,
            sample=sample,
            group_size=group,
            rollout=sample,
            turns=(Turn(0, part.stop - part.start, "stop"),),
            reward=1.0,
            end="completed",
            actor="bench",
            metadata={"turns": 1},
            **{name: self.arrays[name][part] for name in TOKEN_ARRAYS},  # type: ignore[arg-type]
        )

    def trajectories(self, begin: int, count: int) -> list[Trajectory]:
        """Return `count` trajectories from the run's `begin`-th on; their tokens come round again."""
        return [self.trajectory(n % len(self), n) for n in range(begin, begin + count)]
