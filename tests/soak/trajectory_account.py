"""The account of every trajectory of an ended run, made from what its parts left on disk."""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.codec import Json
from bus.errors import StorageError
from bus.trajectory import Trajectory
from launch.verify.comparison import status_of
from learner.progress import lineage
from soak.lease_states import states_of
from storage.disk.atomic_files import read_json
from storage.disk.run_directory import PROGRESS_REMEDY, RunDirectory
from storage.store.replay import ReplayStore
from storage.store.segments import Segment

USED = ("stored", "leased", "committed")


def account(
    run: RunDirectory, *, shards: int, samples: int, max_staleness: int,
    go_on: Callable[[], None] = lambda: None,
) -> dict[str, Json]:  # fmt: skip
    """Compare ledger, replay, checkpoint and lineage; counts are of trajectories, `samples` a group.

    Before each trajectory is read, `go_on` is called: what it raises ends the account. Raises `SluiceError`
    when something to compare is missing, or cannot be read."""
    progress = _progress(run.path / "progress.json")
    groups = states_of(run.ledger)
    lengths = _stored_lengths(run, shards, go_on)
    trained = lineage.read(run.path / "lineage.jsonl", until_step=progress["step"])
    uses = Counter(lease for leases in trained.values() for lease in leases)
    overdue = progress["policy_version"] - max_staleness
    missing = [lease for lease, (state, _) in groups.items() if state in USED and lease not in lengths]
    stuck = [lease for lease, (state, version) in groups.items() if state == "issued" and version < overdue]
    given = {lease for lease, (state, _) in groups.items() if state in ("leased", "committed")}
    consumed = [lengths[lease] for lease in uses if lease in lengths]
    if not consumed:
        raise StorageError(f"of {len(uses)} groups that {run.path} was trained on its replay has none")
    return {
        "steps": progress["step"],
        "groups_issued": len(groups),
        "groups_by_state": dict(sorted(Counter(state for state, _ in groups.values()).items())),
        "trajectories_stored": sum(map(len, lengths.values())),
        "trajectories_trained": progress["trajectories_trained"],
        "lost": (len(missing) + len(stuck)) * samples,
        "trained_too_often": sum(n - 1 for n in uses.values() if n > 1) * samples,
        "trained_but_not_in_ledger": len(set(uses) - given),
        "given_but_not_trained": len(given - set(uses)),
        "length_ks_p": ks_p(np.concatenate(consumed), np.concatenate(list(lengths.values()))),
        "max_staleness_seen": progress["max_staleness_seen"],
        "max_staleness_allowed": max_staleness,
    }


def exit_status(result: dict[str, Json]) -> int:
    """Return 0 when nothing was lost, altered or used twice, the bound held, and resumes left no trace."""
    clean = all(result[key] == 0 for key in ("lost", "trained_too_often", "trained_but_not_in_ledger"))
    verified = result["verify"]
    whole = isinstance(verified, dict) and status_of(verified) == 0
    fair = float(str(result["length_ks_p"])) > 0.01
    bounded = int(str(result["max_staleness_seen"])) <= int(str(result["max_staleness_allowed"]))
    kept = not result.get("broken_promises") and float(str(result.get("known_length_ks_p", 1.0))) > 0.01
    return 0 if clean and whole and fair and bounded and kept and _continuous(result) else 1


def _continuous(result: dict[str, Json]) -> bool:
    """Return whether one process, trained on the same groups from step 0, had the same batches and losses and
    ended with the same weights to the last bit, and whether these say of one group that it was trained on
    once."""
    whole = result["steps"] == result["retrained_batches"] == result["retrained_batches_equal"]
    apart = result["loss_max_abs_diff"], result["weights_max_abs_diff"]  # null if one was finite only once
    equal = all(value == 0 and value is not None for value in apart)
    witness = result["witness"]
    return whole and equal and isinstance(witness, dict) and witness["trained"] == "once"


def ks_p(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """Return the p-value of the two-sample Kolmogorov-Smirnov test: are the samples of one distribution?"""
    from scipy.stats import ks_2samp  # takes a quarter of a second to import, and only this needs it

    return float(ks_2samp(one, other, method="asymp").pvalue)


def _progress(path: Path) -> dict[str, Any]:
    """Return what the learner wrote when it ended."""
    if not path.exists():
        raise StorageError(f"{path} is missing: the run's learner did not end well")
    progress: dict[str, Any] = read_json(path, PROGRESS_REMEDY)
    return progress


def _stored_lengths(
    run: RunDirectory, shards: int, go_on: Callable[[], None]
) -> dict[int, NDArray[np.int64]]:
    """Return the lengths of the trajectories of every complete group in replay, by lease."""
    lengths: defaultdict[int, list[int]] = defaultdict(list)
    for shard in range(shards):
        with closing(ReplayStore.open(run.replay(shard))) as store:
            go_on()
            for trajectory in each_trajectory(store, set(store.completed)):
                lengths[trajectory.lease_id].append(len(trajectory.token_ids))
                go_on()
    return {lease: np.array(of_group) for lease, of_group in lengths.items()}


def each_trajectory(store: ReplayStore, lease_ids: Container[int]) -> Iterator[Trajectory]:
    """Yield the trajectories of these groups that are here, as they were stored, without late rewards.

    Each segment is opened once, and unmapped before the next one is. Nobody may merge or retire segments
    meanwhile. Raises `StorageError` for one that is torn, and for a trajectory whose bytes changed."""
    for entry in store.entries:
        if entry.retired:
            continue
        with closing(Segment(store.directory / entry.name)) as segment:
            for row, lease_id in enumerate(segment.leases.tolist()):
                if lease_id in lease_ids:
                    yield segment.trajectory(row)
