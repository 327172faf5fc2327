"""Every decision about leases, on the ledger: what to issue, what a step gets, whom to believe.

There is no bus here and no clock, so that any order of events can be tested. Changes reach the disk with
`Ledger.flush`, which the dispatcher calls before anybody else hears of them."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import ceil
from typing import Literal

from bus.errors import FencedError
from bus.images import NO_IMAGES
from bus.messages import GroupRejected, PolicyManifest
from bus.requests import LeaseState, StoredGroups
from storage.ledger.given_groups import Use
from storage.ledger.ledger import COMMITTED, Ledger
from storage.ledger.sampling import Choice, StepRequest, choose, expired, lacking, room
from storage.settings.admission import AdmissionConfig, EssBrakeConfig
from storage.shard.ingest_checks import NEWEST_VERSION

FACT = "ess_brake"
"""Fact of the ledger: where the brake stands, as JSON."""


class EssBrake:
    """Says whether only what the next step needs may be issued.

    It begins to hold after `steps` steps in a row whose effective sample size was below the threshold, and
    lets go after as many in a row at or above it. Each published version says the figure of the step that
    made it; one without a figure changes nothing. The ledger keeps where it stands, so that a restart of
    storage lets go of nothing."""

    def __init__(self, ledger: Ledger, config: EssBrakeConfig) -> None:
        """Go on from what the ledger says; without a threshold it never holds."""
        self._ledger = ledger
        self._config = config
        found = json.loads(ledger.facts.get(FACT, "{}")) if config.below is not None else {}
        self.holds = bool(found.get("holds", False))
        self._in_a_row = int(found.get("in_a_row", 0))
        """Steps in a row whose figure speaks for the other state than the present one."""
        self._latest: tuple[str, int] = (found.get("incarnation", ""), found.get("version", -1))
        """Learner and version that were counted last: a version may be announced again."""
        self._fraction = float(found.get("fraction", 1.0))

    def hear(self, manifest: PolicyManifest) -> None:
        """Count the step that made a version, once."""
        below, fraction = self._config.below, manifest.ess_fraction
        version = (manifest.incarnation, manifest.policy_version)
        if below is None or fraction is None or version == self._latest:
            return
        if manifest.incarnation != self._latest[0]:  # steps of an earlier learner may not count any more
            self._in_a_row = 0
        self._latest, self._fraction = version, fraction
        self._in_a_row = self._in_a_row + 1 if (fraction < below) != self.holds else 0
        if self._in_a_row >= self._config.steps:
            self.holds, self._in_a_row = not self.holds, 0
        self._ledger.set_fact(FACT, self._state())

    def _state(self) -> str:
        return json.dumps({
            "holds": self.holds,
            "in_a_row": self._in_a_row,
            "incarnation": self._latest[0],
            "version": self._latest[1],
            "fraction": self._fraction,
        })  # fmt: skip

    @property
    def reason(self) -> str:
        """Return why leases are held back, in words; nothing while it does not hold."""
        if not self.holds:
            return ""
        return (
            f"waiting for the effective sample size: it was {self._fraction:.3f} in the step of version "
            f"{self._latest[1]}, and admission.ess_brake lets go after {self._config.steps} steps in a row "
            f"of at least {self._config.below:g}; until then leases are issued for the next step alone"
        )


STEPS_AT_FIRST = 2
"""Steps ahead to begin with: one that is rolled out while a step is trained, and one for long rollouts."""
STEPS = 8
"""Steps that are looked at before fewer groups are issued, at first."""
MOST_STEPS = 64
LACKING = 0.01
"""Share of its groups that a step may lack on average, so that data is fresher."""


class GroupsAhead:
    """Lowers the number of groups ahead while some are spare, and raises it when a step lacks some.

    When a step is done, the groups of the next one should be complete. What is complete besides only grows
    old until it is trained on, and what waits for an actor then is not needed yet, whatever the speed of
    generation, its lengths and their spread."""

    def __init__(self, config: AdmissionConfig) -> None:
        """Begin with all that the bound allows, or at most `STEPS_AT_FIRST` where the number follows need, as
        after every start of storage."""
        self._follows_need = config.ahead == "need"
        self._most = config.max_staleness * config.groups_per_step
        first = STEPS_AT_FIRST * config.groups_per_step if self._follows_need else self._most
        self.groups = min(self._most, first)
        self._groups_per_step = config.groups_per_step
        self._steps = STEPS
        self._settling = 0
        """Steps that still train on what an earlier number of groups brought."""
        self._spare: list[int] = []

    def step_done(self, left_over: int, waiting: int = 0) -> None:
        """Take note of a step's end.

        Args:
            left_over: complete groups besides the next step's; those that it lacks, as a negative number.
            waiting: groups that have not begun. As many of those that a step lacks would not come sooner if
                more were issued; engines have some at any time, of requests that have no token yet."""
        if not self._follows_need:
            return
        spare = left_over + waiting
        if spare < 0:
            if self.groups < self._most and not self._settling:
                self._steps = min(2 * self._steps, MOST_STEPS)  # lowered too far: lower it less often
            self._set(min(self._most, self.groups - spare))
        elif self._settling:
            self._settling -= 1
        else:
            self._spare.append(spare)
            if len(self._spare) == self._steps:
                self._set(max(0, self.groups - self._surplus()))

    def _surplus(self) -> int:
        """Return the largest number of groups without which these steps would have lacked no more than
        `LACKING`: the newsvendor's quantile, by what steps lack instead of how many lack some."""
        lacking = LACKING * self._groups_per_step * len(self._spare)
        sums = accumulate(sorted(self._spare))
        return int(min((lacking + fewest) / n for n, fewest in enumerate(sums, 1)))

    def _set(self, groups: int) -> None:
        if groups != self.groups:
            self._settling = ceil(max(groups, self.groups) / self._groups_per_step) + 1
        self.groups = groups
        self._spare = []


TRAINS_FROM = "trains_from"
"""Fact of the ledger: the version with which reinforcement learning began."""


def older_of_the_same(manifest: PolicyManifest, than: PolicyManifest) -> bool:
    """Return whether one learner published `manifest` before `than`."""
    same = manifest.incarnation == than.incarnation
    return same and manifest.policy_version < than.policy_version


class Admission:
    """Decides what is rolled out and what is trained on."""

    def __init__(
        self, ledger: Ledger, config: AdmissionConfig, *,
        seed: int, is_quarantined: Callable[[int], bool] = lambda lease_id: False,
        on_outcome: Callable[[int, Sequence[float]], None] = lambda lease_id, rewards: None,
        prompts_left: Callable[[], float] = lambda: math.inf,
    ) -> None:  # fmt: skip
        self.policy: PolicyManifest | None = None
        self.opened = False
        """Whether leases may be issued: the prompts are known to fit the model."""
        self._ledger = ledger
        self._config = config
        self._seed = seed
        self._is_quarantined = is_quarantined
        """Whether the prompt of a lease is one that must not be rolled out again."""
        self._on_outcome = on_outcome
        """Hears once of each group that is complete or rejected, with its rewards if they are known."""
        self._prompts_left = prompts_left
        """Returns how many leases there are prompts for."""
        self.waiting = 0
        """Groups issued that no actor has begun, as far as is known."""
        self.to_close: set[int] = set()
        """Groups that keep a step for too long: their shards are to close them short."""
        self.brake = EssBrake(ledger, config.ess_brake)
        self.ahead = GroupsAhead(config)
        self._waiting: tuple[int, float] | None = None
        """The step that waits, and since when nothing happened that could end that."""

    # --- what to issue ---

    @property
    def held_back(self) -> str:
        """Return why leases are issued for the next step alone, in words; nothing if they are not."""
        paused = "" if self.policy is None else self.policy.pause_reason
        return self.brake.reason or (paused and f"admission is paused: {paused}")

    def room(self) -> int:
        """Return the number of leases that may be issued now.

        AReaL's capacity rule, with what was trained read from the ledger instead of computed from the
        version, so that it stays right when batch size or bound change on a resume."""
        policy, config = self.policy, self._config
        if policy is None or policy.stage != "rl" or not self.opened:
            return 0
        step, each = policy.policy_version - policy.trains_from, config.sampler.min_samples_per_insert
        oldest = policy.policy_version - config.max_staleness
        within = room(
            owed=self._ledger.owed(step, each, oldest_version=oldest),
            groups=config.groups_per_step,
            max_staleness=self._issued_ahead(each),
            samples_each=each,
        )
        if next(reversed(self._ledger.steps), 0) > step:
            return within
        lacking = self._lacking() - len(self._ledger.rolling_out)
        return max(within, lacking, self._too_few_to_reuse(oldest))  # or the step would wait for ever

    def _too_few_to_reuse(self, oldest_version: int) -> int:
        """Return how many groups the next step lacks where staleness is exact and groups are used again. They
        are issued for fewer uses than a step of different groups needs, as at the start."""
        config, ledger = self._config, self._ledger
        if not config.exact_staleness or config.sampler.max_reuse == 1:
            return 0
        again = sum(n < config.sampler.max_reuse for _, n in ledger.used(oldest_version))
        return config.groups_per_step - len(ledger.rolling_out) - len(ledger.stored) - again

    def _issued_ahead(self, samples_each: float) -> float:
        """Return for how many steps after the next one groups are issued.

        While they are held back these are the fewest with which every step gets its groups: none, unless a
        group is to be trained on several times. Whatever is owed already is trained on, so no step waits for
        ever. Exact staleness with r uses each has r - 1 versions partly used up, by half on average."""
        config = self._config
        fewest = min(config.max_staleness, math.ceil(samples_each) - 1)
        if self.held_back:
            return fewest
        if config.exact_staleness and config.sampler.max_reuse > 1:
            return config.max_staleness - (config.sampler.max_reuse - 1) / 2
        return self.ahead.groups / config.groups_per_step

    def issue(self) -> list[int]:
        """Open leases for all the room there is; return the ids of those to roll out.

        A lease whose turn falls to a quarantined prompt is refunded at once, so that the others' prompts stay
        those that their numbers say."""
        issued: list[int] = []
        while (count := int(min(self.room(), self._prompts_left()))) > 0 and self.policy is not None:
            leases = self._ledger.issue(count, self.policy.policy_version)
            skipped = {lease_id for lease_id in leases if self._is_quarantined(lease_id)}
            for lease_id in skipped:
                self._ledger.reject(lease_id, "skipped")
            issued += [lease_id for lease_id in leases if lease_id not in skipped]
            if not skipped:
                break
        return issued

    def state(self, lease_id: int) -> LeaseState:
        """Return what an actor that holds the lease should know; it may hear it once the ledger is
        flushed."""
        lease = self._ledger.rolling_out.get(lease_id)
        if lease is not None:
            return LeaseState(state="open", policy_version=lease.policy_version)
        state: Literal["settled", "quarantined"] = "settled"
        if self._ledger.was_issued(lease_id) and self._is_quarantined(lease_id):
            state = "quarantined"
        return LeaseState(state=state, policy_version=0)

    # --- what happened elsewhere ---

    def on_policy(self, manifest: PolicyManifest) -> bool:
        """Take note of the published version; return False when it was known."""
        if manifest.policy_version > int(self._ledger.facts.get(NEWEST_VERSION, "-1")):
            self._ledger.set_fact(NEWEST_VERSION, str(manifest.policy_version))
        if self.policy == manifest:
            return False
        if self.policy is not None and older_of_the_same(manifest, self.policy):
            return False  # a late poll must not take back a notice
        if self.is_fenced(manifest.incarnation):
            return False  # nor what the learner before this one left behind
        before = self.policy
        if before is not None and manifest.stage == before.stage == "rl":
            self._note_step(manifest, before)
        self.policy = manifest
        self.brake.hear(manifest)
        if self._ledger.facts.get(TRAINS_FROM) != str(manifest.trains_from):
            self._ledger.set_fact(TRAINS_FROM, str(manifest.trains_from))
        self._forget_past()
        return True

    def _note_step(self, manifest: PolicyManifest, before: PolicyManifest) -> None:
        """Tell what was complete when the step of a version was done, unless leases are held back, or the
        version before is announced once more, such as with a snapshot, while the next step goes on."""
        each, ledger = self._config.groups_per_step, self._ledger
        next_step = manifest.policy_version - manifest.trains_from + 1
        if manifest.policy_version > before.policy_version and not self.held_back:
            left_over = len(ledger.stored) + len(ledger.uses(next_step)) - each
            self.ahead.step_done(left_over, self.waiting)

    def seen(self, shard: int) -> int:
        """Return how many groups of that shard the ledger knows to be complete."""
        return int(self._ledger.facts.get(f"shard_{shard}", "0"))

    def on_stored(self, news: StoredGroups) -> bool:
        """Take note of groups that a shard completed; return False when all of them were known."""
        through = news.after + len(news.lease_ids)
        if through <= self.seen(news.shard):
            return False
        groups = len(news.lease_ids)
        spreads: Sequence[float] = news.spreads or [0.0] * groups
        tokens: Sequence[int] = news.tokens or [0] * groups
        computed: Sequence[int] = news.computed_tokens or [0] * groups
        rewards: Sequence[Sequence[float]] = news.rewards or [()] * groups
        counts = zip(tokens, computed, news.images or [NO_IMAGES] * groups, strict=True)
        for lease_id, spread, count, found in zip(news.lease_ids, spreads, counts, rewards, strict=True):
            if self._ledger.store(lease_id, spread, *count):
                self._on_outcome(lease_id, found)
        self._ledger.set_fact(f"shard_{news.shard}", str(through))
        self._waiting = None
        return True

    def on_rejected(self, rejections: Iterable[GroupRejected]) -> None:
        """Refund the leases of groups that were filtered out or failed."""
        for rejection in rejections:
            if rejection.lease_id in self._ledger.rolling_out:  # else a redelivered lease had two outcomes
                self._ledger.reject(rejection.lease_id, rejection.reason)
                self._on_outcome(rejection.lease_id, rejection.rewards)

    def on_closed(self, complete: Iterable[int], few: Iterable[int]) -> None:
        """Shards have closed groups, of which their lists tell, or have too little of them: refunded."""
        self.to_close.difference_update(complete)
        for lease_id in few:
            self.to_close.discard(lease_id)
            if lease_id in self._ledger.rolling_out:
                self._ledger.reject(lease_id, "incomplete")

    # --- what a step gets ---

    def batch(self, step: int, train_version: int, *, now_s: float) -> list[Use] | str:
        """Return the groups of a step, the same whenever it is asked for, or what it waits for."""
        ledger = self._ledger
        if given := ledger.uses(step):
            return given
        self._drop_expired(train_version)
        while True:
            choice = self._choose(step, train_version)
            if choice.leases:
                ledger.lease(step, choice.leases, choice.weights)
                self._waiting = None
                return ledger.steps[step]
            self._let_older_weights_sample(choice.blockers, train_version)
            if not self._lose_patience(step, choice, now_s):
                return choice.waiting_for

    def enough_stored(self) -> bool:
        """Return whether there may be as many groups as a step needs; without them `batch` gives none."""
        config = self._config
        return config.sampler.max_reuse > 1 or len(self._ledger.stored) >= config.groups_per_step

    def _choose(self, step: int, train_version: int) -> Choice:
        config, ledger = self._config, self._ledger
        if config.exact_staleness and (wait := self._still_to_be_sampled(train_version)) is not None:
            return wait
        if lack := self._lacking():
            out = sorted(ledger.rolling_out.values())
            return Choice(
                waiting_for=f"{lack} more groups stored, by sampler.max_samples_per_insert; {len(out)} are "
                "rolling out",
                blockers=tuple(c.lease_id for c in out[:lack]),
            )
        question = StepRequest(
            groups=config.groups_per_step,
            train_version=train_version,
            max_staleness=config.max_staleness,
            step=step,
            seed=self._seed,
            exact_staleness=config.exact_staleness,
        )
        again = ledger.used(train_version - config.max_staleness) if config.sampler.max_reuse > 1 else ()
        return choose(config.sampler, ledger.stored.values(), again, ledger.rolling_out.values(), question)

    def _still_to_be_sampled(self, train_version: int) -> Choice | None:
        """Return what a step of exact staleness waits for: its version, and all that is issued at it."""
        out = sorted(self._ledger.rolling_out.values())
        version = -1 if self.policy is None else self.policy.policy_version
        if version < train_version:
            return Choice(waiting_for=f"version {train_version}, since staleness is exact")
        if out or self.room():
            return Choice(
                waiting_for=f"all groups issued at version {version}, since staleness is exact; "
                f"{len(out)} are rolling out",
                blockers=tuple(candidate.lease_id for candidate in out),
            )
        return None

    def _lacking(self) -> int:
        """Return the number of groups yet to be stored before the next step keeps to the largest
        sample-to-insert ratio."""
        at_most = self._config.sampler.max_samples_per_insert
        if at_most is None:
            return 0
        ledger, groups = self._ledger, self._config.groups_per_step
        return lacking(samples=ledger.samples, inserted=ledger.inserted(), groups=groups, at_most=at_most)

    def _drop_expired(self, train_version: int) -> None:
        staleness, ledger = self._config.max_staleness, self._ledger
        for lease_id in expired(ledger.stored.values(), train_version=train_version, max_staleness=staleness):
            ledger.reject(lease_id, "stale")
        if self._config.incomplete != "wait":  # too late also to be closed short
            out = ledger.rolling_out.values()
            for lease_id in expired(out, train_version=train_version, max_staleness=staleness):
                ledger.reject(lease_id, "incomplete")

    def _let_older_weights_sample(self, lease_ids: Iterable[int], train_version: int) -> None:
        """No step can wait for groups that may be sampled only by the weights which come after it.

        A learner that died leaves such leases, when its successor resumes from further back and the groups
        taken back do not last for the steps up to that version."""
        out = self._ledger.rolling_out
        ahead = [n for n in lease_ids if n in out and out[n].policy_version > train_version]
        if ahead:
            self._ledger.lower(ahead, train_version)

    def _lose_patience(self, step: int, choice: Choice, now_s: float) -> bool:
        if self._config.incomplete == "wait" or not choice.blockers:
            return False
        if self._waiting is None or self._waiting[0] != step:
            self._waiting = (step, now_s)
        if now_s - self._waiting[1] < self._config.patience_s:
            return False
        if self._config.incomplete == "close_short":
            self.to_close.update(choice.blockers)
            return False
        for lease_id in choice.blockers:
            self._ledger.reject(lease_id, "incomplete")
        self._waiting = None
        return True

    # --- learners come and go ---

    def commit(self, step: int, incarnation: str) -> None:
        """A durable checkpoint holds every step up to `step`."""
        self.refuse_fenced(incarnation)
        self._ledger.commit(step)
        self._ledger.set_fact(COMMITTED, str(step))
        self._forget_past()

    def on_unreadable(self, step: int, lease_ids: Iterable[int], incarnation: str) -> list[int]:
        """Choose the groups of `step` anew without those that cannot be read; return those given up now.
        Their leases are refunded. Raises `FencedError` when another learner took over."""
        self.refuse_fenced(incarnation)
        given = {use.lease_id for use in self._ledger.uses(step)}
        damaged = sorted(given.intersection(lease_ids))
        if damaged:
            self._ledger.roll_back(step - 1)  # no younger step can be trained on before this one is
            for lease_id in damaged:
                self._ledger.give_up(lease_id)
        return damaged

    def resume(self, step: int, incarnation: str) -> int:
        """Let a learner go on from `step` and fence all before it; return how many uses that rolled back.

        One that comes anew has loaded the checkpoint of `step`. One that was here already only gives steps
        back: its newest checkpoint may be older, and a crash would need the groups from there on."""
        if self.policy is not None and self.policy.incarnation != incarnation:
            self.policy = None  # the learner goes on from another, which it publishes next
        again = self._ledger.facts.get("incarnation") == incarnation
        self._ledger.set_fact("incarnation", incarnation)
        self._ledger.set_fact(COMMITTED, str(min(step, self._committed()) if again else step))
        self._waiting = None
        return self._ledger.roll_back(step)

    def unsettled(self) -> list[int]:
        """Return the leases whose trajectories a step may still be given, or a resumed learner trains on
        again."""
        ledger, committed = self._ledger, self._committed()
        needed = {use.lease_id for step, uses in ledger.steps.items() if step > committed for use in uses}
        if self._config.sampler.max_reuse > 1:
            needed.update(group.lease_id for group, _ in ledger.used(self._oldest_version(max(0, committed))))
        return [*ledger.rolling_out, *ledger.stored, *needed]

    def _committed(self) -> int:
        return int(self._ledger.facts.get(COMMITTED, "-1"))

    def _oldest_version(self, step: int) -> int:
        """Return the oldest version whose groups a learner may still be given that resumes from `step`."""
        trains_from = int(self._ledger.facts.get(TRAINS_FROM, "0"))
        return max(0, trains_from + step - self._config.max_staleness)

    def _forget_past(self) -> None:
        """Keep nothing in memory of steps that are committed, and past which the published version is."""
        if self.policy is not None and self.policy.stage == "rl":
            step = min(self._committed(), self.policy.policy_version - self.policy.trains_from)
            self._ledger.forget(step, oldest_version=self._oldest_version(max(0, step)))

    def refuse_fenced(self, incarnation: str) -> None:
        """Raise `FencedError` when another learner took over from this one."""
        if self.is_fenced(incarnation):
            raise FencedError(f"learner {incarnation} was replaced by {self._ledger.facts['incarnation']}")

    def is_fenced(self, incarnation: str) -> bool:
        """Return whether another learner took over from this one."""
        return self._ledger.facts.get("incarnation", incarnation) != incarnation
