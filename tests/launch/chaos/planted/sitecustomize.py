"""Plants faults in a storage, a learner or actors that have this directory in PYTHONPATH.

SLUICE_PLANT names the faults, with commas between, and SLUICE_PLANTED a file that takes a line for each
trajectory that one struck. Python imports this module by its name when it starts."""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

LATE_S = float(os.environ.get("SLUICE_PLANTED_LATE_S", "3"))
"""Time between an early ack and the write."""
EVERY = {"dropped": 50, "inverted": 10, "altered": 23, "swapped": 17}
"""Of so many trajectories one is struck; every 50th is 2 %."""


def note(fault: str, *trajectories) -> None:
    """Write down which trajectories were struck."""
    with Path(os.environ["SLUICE_PLANTED"]).open("a") as file:
        file.writelines(f"{fault} {trajectory.trajectory_id}\n" for trajectory in trajectories)


def inverted(one):
    """Turn a reward round."""
    return replace(one, reward=1.0 - one.reward)


def altered(one):
    """Change a token."""
    tokens = one.token_ids.copy()
    tokens[-2] += 1 if tokens[-2] == 0 else -1
    return replace(one, token_ids=tokens)


def swapped(one, other) -> list:
    """Give each of two siblings the name of the other."""
    names = ("trajectory_id", "sample", "rollout")
    return [
        replace(other, **{name: getattr(one, name) for name in names}),
        replace(one, **{name: getattr(other, name) for name in names}),
    ]


class Planted:
    """Strikes some of the trajectories that arrive, each by one fault at most."""

    def __init__(self, faults: set[str]) -> None:
        self._faults = faults
        self._seen = 0

    def struck(self, whole: list) -> list:
        """Return what is left of the trajectories of a message."""
        kept: list = []
        while whole:
            one = whole.pop(0)
            self._seen += 1
            fault = next(
                (name for name in EVERY if name in self._faults and not self._seen % EVERY[name]), ""
            )
            if fault == "swapped" and whole and whole[0].lease_id == one.lease_id:
                other = whole.pop(0)
                self._seen += 1
                note(fault, one, other)
                kept += swapped(one, other)
            elif fault in ("", "swapped"):
                kept.append(one)
            else:
                note(fault, one)
                kept += [] if fault == "dropped" else [globals()[fault](one)]
        return kept


def plant_in_shard(faults: set[str]) -> None:
    """Change what a shard does with what it receives."""
    from bus.trajectory import TrajectoryBatch
    from storage.shard.server import Shard

    append, tasks, planted = Shard._append, set(), Planted(faults)

    async def write_later(self, batches) -> None:
        await asyncio.sleep(LATE_S)
        await append(self, batches)

    async def ack_early(self, batches) -> None:
        note("early_ack", *(one for batch in batches for one in batch.whole))
        task = asyncio.create_task(write_later(self, batches))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def change(self, batches) -> None:
        changed = [
            TrajectoryBatch(trajectories=tuple(planted.struck(list(batch.whole))), turns=batch.turns)
            for batch in batches
        ]
        await append(self, changed)

    Shard._append = ack_early if "early_ack" in faults else change


def plant_in_learner() -> None:
    """Train on one group of each tenth step twice, in the place of another."""
    from learner.world.rank import Rank

    fetch = Rank._fetch

    async def twice(self, step, refs, given_to):
        groups, answers = await fetch(self, step, refs, given_to)
        if step % 10 == 5 and len(groups) > 1:
            groups = [groups[0], groups[0], *groups[2:]]
            note("trained_twice", *groups[0])
        return groups, answers

    Rank._fetch = twice


def plant_in_engine() -> None:
    """Give the embedded engine other weights than were published."""
    from actors.engines.embedded import engine

    prepare = engine.prepare_weights

    def perturbed(model, state, *, complete):
        found = prepare(model, state, complete=complete)
        return {name: 3.0 * tensor if tensor.dim() > 1 else tensor for name, tensor in found.items()}

    engine.prepare_weights = perturbed


faults = set(os.environ.get("SLUICE_PLANT", "").split(",")) - {""}
if "trained_twice" in faults and "learner" in sys.orig_argv:
    plant_in_learner()
elif "perturbed" in faults and "actors" in sys.orig_argv:
    plant_in_engine()
elif faults - {"trained_twice"} and "storage" in sys.orig_argv:
    plant_in_shard(faults)
