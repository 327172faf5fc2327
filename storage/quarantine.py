"""What a shard must not store although it can be read: forged, of another run, or not of this vocabulary."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from bus.errors import SchemaError
from bus.messages import Trajectory, group_name, trajectory_name
from storage.ledger import Ledger

RUN_ID, VOCABULARY, NEWEST_VERSION = "run_id", "vocabulary", "newest_version"
"""Facts of the ledger: this run's identity, its model's token ids, the newest version it ever published."""


@dataclass(frozen=True)
class Quarantine:
    """What the ledger knows of a run, held against what actors send. Every refusal is a `SchemaError`.

    A fact that is not known yet refuses nothing."""

    ledger: Ledger
    look_at_policy: Callable[[], Awaitable[None]]
    """Reads the newest published version: actors may have heard of it first."""

    def check_identity(self, trajectories: Iterable[Trajectory]) -> None:
        """Refuse what is not what it says it is: whose lease it really was, nobody can tell."""
        run = self.ledger.facts.get(RUN_ID, "")
        for t in trajectories:
            names = t.trajectory_id, t.group_id
            if names != (trajectory_name(t.lease_id, t.sample), group_name(t.lease_id)):
                raise _refusal(t, "identity", f"the names {names} are not those of lease {t.lease_id}")
            if t.run and run and t.run != run:
                raise _refusal(t, "identity", f"it is of run {t.run}; this one, of the same name, is {run}")

    async def check_content(self, trajectories: Iterable[Trajectory]) -> None:
        """Refuse tokens that the model does not have, and versions that cannot have sampled them."""
        vocabulary = self._number(VOCABULARY)
        for t in trajectories:
            if vocabulary is not None and (largest := int(t.token_ids.max())) >= vocabulary:
                raise _refusal(
                    t,
                    "vocabulary",
                    f"token id {largest}, of a vocabulary of {vocabulary}: another tokenizer?",
                )
            await self._check_versions(t)

    async def _check_versions(self, t: Trajectory) -> None:
        lease = self.ledger.rolling_out.get(t.lease_id)  # of a settled one nothing is stored any more
        if lease is not None and t.oldest_version < lease.policy_version:
            raise _refusal(
                t, "version", f"a token of version {t.oldest_version}, of a lease issued at version "
                f"{lease.policy_version}: it would exceed the staleness bound"
            )  # fmt: skip
        newest = int(t.policy_versions[t.loss_mask].max())
        if newest <= self._newest(newest):
            return
        await self.look_at_policy()
        if newest > (published := self._newest(newest)):
            raise _refusal(
                t, "version", f"a token of version {newest}, of which {published} is the newest published"
            )

    def _newest(self, otherwise: int) -> int:
        known = self._number(NEWEST_VERSION)
        return otherwise if known is None else known

    def _number(self, fact: str) -> int | None:
        found = self.ledger.facts.get(fact)
        return None if found is None else int(found)


def _refusal(trajectory: Trajectory, kind: str, why: str) -> SchemaError:
    return SchemaError(f"{trajectory.trajectory_id}: {why}", kind=kind, actor=trajectory.actor)
