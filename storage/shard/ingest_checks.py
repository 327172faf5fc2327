"""What a shard must not store although it can be read: forged, of another run, or not of this vocabulary."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from bus.errors import SchemaError
from bus.messages import group_name, trajectory_name
from bus.requests import Issued
from bus.topology import shard_of
from bus.trajectory import KeptTurn, Trajectory, refuse_impossible_logprobs
from storage.ledger.ledger import Ledger

RUN_ID, VOCABULARY, NEWEST_VERSION = "run_id", "vocabulary", "newest_version"
"""Facts of the ledger: this run's identity, its model's token ids, the newest version it ever published."""
Sampled = Trajectory | KeptTurn
"""What an actor has sampled."""


class RunFacts(Protocol):
    """What is known of a run so far; whoever is away from its ledger knows what was heard last."""

    @property
    def run(self) -> str:
        """Return this run's identity among those of its name; empty if not known yet."""

    @property
    def vocabulary(self) -> int | None:
        """Token ids of its model."""

    @property
    def newest_version(self) -> int | None:
        """Return the newest version it ever published."""

    def issue_version(self, lease_id: int) -> int | None:
        """Return the learner's version when the lease was issued, if it is still rolling out and that is
        known."""

    async def look(self) -> None:
        """Hear what is new: actors may have heard of it first."""


@dataclass(frozen=True)
class LedgerFacts:
    """Facts of the ledger, in the process that has it."""

    ledger: Ledger
    look_at_policy: Callable[[], Awaitable[None]]
    """Reads the newest published version."""

    @property
    def run(self) -> str:
        """Return this run's identity, which the ledger keeps."""
        return self.ledger.facts.get(RUN_ID, "")

    @property
    def vocabulary(self) -> int | None:
        """Return the number of token ids, which the ledger keeps."""
        return self._number(VOCABULARY)

    @property
    def newest_version(self) -> int | None:
        """Return the newest version published, which the ledger keeps."""
        return self._number(NEWEST_VERSION)

    def issue_version(self, lease_id: int) -> int | None:
        """None for a settled lease too: of such a one nothing is stored any more."""
        lease = self.ledger.rolling_out.get(lease_id)
        return None if lease is None else lease.policy_version

    async def look(self) -> None:
        """Look at the policy; the rest is new already."""
        await self.look_at_policy()

    def issued(self, shard: int, shards: int, seen: int) -> Issued:
        """Return what a shard elsewhere must know, `seen` of whose complete groups the ledger has."""
        leases = [c for c in self.ledger.rolling_out.values() if shard_of(c.lease_id, shards) == shard]
        return Issued(
            next_id=self.ledger.next_id,
            seen=seen,
            run=self.run,
            vocabulary=self.vocabulary,
            newest_version=self.newest_version,
            rolling_out=tuple(lease.lease_id for lease in leases),
            versions=tuple(lease.policy_version for lease in leases),
        )

    def _number(self, fact: str) -> int | None:
        found = self.ledger.facts.get(fact)
        return None if found is None else int(found)


@dataclass(frozen=True)
class Quarantine:
    """Compares what actors send with what is known of a run. Every refusal is a `SchemaError`. A fact that is
    not known yet refuses nothing, and none does before it was looked up once more."""

    facts: RunFacts

    async def check_identity(self, trajectories: Iterable[Trajectory]) -> None:
        """Refuse a trajectory under a false name: whose lease it really was, nobody can tell."""
        for t in trajectories:
            names = t.trajectory_id, t.group_id
            if names != (trajectory_name(t.lease_id, t.sample), group_name(t.lease_id)):
                raise _refusal(t, "identity", f"the names {names} are not those of lease {t.lease_id}")
            await self._check(t, self._other_run)

    async def check_content(self, trajectories: Iterable[Trajectory]) -> None:
        """Refuse tokens that the model does not have, and log-probs and versions that cannot have sampled
        them."""
        for t in trajectories:
            refuse_impossible_logprobs(t)
            await self._check(t, self._foreign_token)
            await self._check(t, self._too_old)
            await self._check(t, self._never_published)

    async def check_turns(self, turns: Iterable[KeptTurn]) -> None:
        """Refuse turns of another run, and what `check_content` refuses."""
        for turn in turns:
            await self._check(turn, self._other_run)
            await self._check(turn, self._foreign_token)
            await self._check(turn, self._too_old)
            await self._check(turn, self._never_published)

    async def _check(self, t: Sampled, fault: Callable[[Sampled], SchemaError | None]) -> None:
        if fault(t) is None:
            return
        await self.facts.look()
        if (error := fault(t)) is not None:
            raise error

    def _other_run(self, t: Sampled) -> SchemaError | None:
        run = self.facts.run
        if not t.run or not run or t.run == run:
            return None
        return _refusal(t, "identity", f"it is of run {t.run}; this one, of the same name, is {run}")

    def _foreign_token(self, t: Sampled) -> SchemaError | None:
        vocabulary, largest = self.facts.vocabulary, int(t.token_ids.max(initial=-1))
        if (kept := t.kept_sets) is not None:
            largest = max(largest, int(kept.token_ids.max(initial=-1)))
        if vocabulary is None or largest < vocabulary:
            return None
        return _refusal(
            t, "vocabulary", f"token id {largest}, of a vocabulary of {vocabulary}: another tokenizer?"
        )

    def _too_old(self, t: Sampled) -> SchemaError | None:
        issued = self.facts.issue_version(t.lease_id)
        if issued is None or t.oldest_version >= issued:
            return None
        return _refusal(
            t, "version", f"a token of version {t.oldest_version}, of a lease issued at version {issued}: "
            "it would exceed the staleness bound"
        )  # fmt: skip

    def _never_published(self, t: Sampled) -> SchemaError | None:
        published, newest = self.facts.newest_version, t.newest_version
        if published is None or newest <= published:
            return None
        return _refusal(
            t, "version", f"a token of version {newest}, of which {published} is the newest published"
        )


def _refusal(sampled: Sampled, kind: str, why: str) -> SchemaError:
    name = sampled.name if isinstance(sampled, KeptTurn) else sampled.trajectory_id
    return SchemaError(f"{name}: {why}", kind=kind, actor=sampled.actor)
