"""What is missing in a run, and what each of its processes waits for, in words."""

from collections.abc import Iterator

from bus.connection.roles import lives_here
from bus.messages import RoleHolder, Status, stores_nothing
from launch.run_view.run_status import LISTEN_S, RunState
from launch.run_view.status_texts import holders_text
from launch.run_view.units import duration, since
from storage.metrics.records import integer

FULL = 0.95
"""Part of a stream's bytes from which it counts as full."""
REFUSING = ("TASKS", "TRAJECTORIES", "OUTCOMES", "FILES")
"""Streams that refuse messages when they are full."""


def waits_for_leases(actor: Status) -> bool:
    """Tell whether an actor could run rollouts and has none; not so one that only evaluates, or yields."""
    return actor.wait == "leases"


def problems(state: RunState) -> list[str]:
    """Return what is missing or stuck, each in a sentence; nothing for a healthy run, or one that is done."""
    found = [f"the bus does not answer a question: {what}" for what in state.unanswered]
    if state.stage == "done":
        return found
    missing = [*_storage(state), *_learner(state), *_actors(state)]
    found += [state.full_disk, *_ended(state)] if state.full_disk else missing
    found += full_streams(state)
    for status in state.statuses.values():
        if status.settings_differ:
            names = "; ".join(status.settings_differ)
            found.append(f"{status.source} works by other settings than the run has, start it again: {names}")
        if status.not_storing and not state.full_disk:  # a full disk explains this
            found.append(f"{status.source} says: {stores_nothing(status.not_storing)}")
        if alarm := status.values.get("alarm"):
            found.append(f"{status.source}: ALARM: {alarm}")
    return found


def full_streams(state: RunState) -> Iterator[str]:
    """Yield which streams refuse messages since they are full."""
    for name, info in state.streams.items():
        bound = info.config.max_bytes or 0
        if name.partition("-")[0] in REFUSING and bound > 0 and info.state.bytes >= FULL * bound:
            yield f"the stream {name} is full: {info.state.bytes} of {bound} bytes, its senders wait"


def _ended(state: RunState) -> Iterator[str]:
    """Yield who is away on a full disk: a process that cannot write ends."""
    here = {status.role for status in state.statuses.values()}
    if away := [role for role in ("storage", "learner", "actor") if role not in here]:
        yield f"no answer from {' and '.join(away)}: `launch local` starts who ended again when there is room"


def _storage(state: RunState) -> Iterator[str]:
    holder = state.holders.get("dispatcher")
    heard = state.of_role("storage")
    if state.dispatcher is None and heard:
        yield f"the dispatcher did not answer within {LISTEN_S:g} s; storage says: {heard[0].text}"
    elif state.dispatcher is None:
        yield _missing("storage", holder, state=state, role="dispatcher")
    elif state.config is None and state.settings_known:
        yield "storage has not announced the run yet"
    if state.config is None or (state.dispatcher is None and not heard):
        return
    silent = [shard for shard in range(state.config.replay.shards) if shard not in state.shards]
    if silent:
        names = ", ".join(map(str, silent))
        yield f"{'shards' if len(silent) > 1 else 'shard'} {names} did not answer within {LISTEN_S:g} s"


def _learner(state: RunState) -> Iterator[str]:
    if not state.of_role("learner") and "learner" not in state.renewed:
        yield _missing("learner", state.holders.get("learner"), state=state, role="learner")


def _actors(state: RunState) -> Iterator[str]:
    """Say that no actor was heard, and what the bus knows of some: a busy host may be late by seconds."""
    if state.of_role("actor") or (state.config is not None and not state.config.has_rollouts):
        return
    out = integer(state.monitor.values("storage"), "rolling_out")
    leases = f", and {out} groups are to be rolled out" if out else ""
    rollout = state.consumers.get("TASKS/rollout")
    asking = 0 if rollout is None else rollout.num_waiting or 0
    held = 0 if rollout is None else rollout.num_ack_pending or 0
    if asking:
        yield f"no actor was heard within {LISTEN_S:g} s, but some ask the bus for leases: they are busy"
    else:
        taken = (
            "" if state.leased_s is None else f", none was taken since {since(state.leased_s, state.asked_s)}"
        )
        kept = f"; {held} leases are held by actors that are busy or gone{taken}" if held else ""
        yield (
            f"no actor was heard within {LISTEN_S:g} s{leases}{kept}: "
            f"if none runs, start one with `launch actors --run {state.run}`"
        )


def _missing(name: str, holder: RoleHolder | None, *, state: RunState, role: str) -> str:
    if holder is None and not state.roles_known:
        return f"{name} was not heard within {LISTEN_S:g} s, and the bus did not say who holds its role"
    if holder is None:
        return (
            f"no {name} holds its role: if none is starting, start one with `launch {name} --run {state.run}`"
        )
    where = f"process {holder.pid} on {holder.host}"
    if role in state.renewed:
        return (
            f"{name} is starting or busy: {where} renews its role, and answered nothing within {LISTEN_S:g} s"
        )
    lives = lives_here(holder)
    known = "" if lives is None else ", and lives" if lives else ", and has ended"
    silent = f", {text}" if (text := state.silent_since(role)) else ""
    return f"{name} was not heard within {LISTEN_S:g} s: {where} held its role last{known}{silent}"


def waits(state: RunState) -> list[str]:
    if state.stage == "done":
        return ["nobody waits: the run is done"]
    found = [*_waiting_learner(state), *waiting_actors(state)]
    others = (status for status in state.statuses.values() if status.role not in ("learner", "actor"))
    return found + [f"{one.source}: {one.text}" for one in others if one.waits]


def _waiting_learner(state: RunState) -> Iterator[str]:
    learner = state.statuses.get("learner")
    if learner is None or not learner.waits:
        return
    step, storage = integer(learner.values, "step") + 1, state.monitor.values("storage")
    so_far = "" if state.waiting is None else f", for {duration(state.asked_s - state.waiting.since_s)} now"
    if learner.wait != "batch":
        yield f"the learner, before step {step}: {learner.text}{so_far}"
        return
    if state.dispatcher is None or state.full_disk:
        why = state.full_disk or f"storage did not answer within {LISTEN_S:g} s"
        yield f"the learner waits for the groups of step {step}: {why}{so_far}"
        return
    wanted = 0 if state.config is None else state.config.admission.groups_per_step
    missing = wanted - integer(storage, "stored")
    if missing > 0 and storage:
        yield (
            f"the learner waits for {missing} more groups of step {step}: {_rolling_out(state)}, "
            f"{integer(storage, 'rolling_out')} groups are out{_held(state)}{so_far}"
        )
    else:
        reason = learner.reason or "storage has not chosen them yet"
        yield f"the learner waits for the groups of step {step}: {reason}{_held(state)}{so_far}"


def _rolling_out(state: RunState) -> str:
    if not (actors := state.of_role("actor")):
        return f"no actor was heard within {LISTEN_S:g} s"
    busy = sum(integer(actor.values, "running") > 0 for actor in actors)
    return f"{busy or 'no'} {'actor is' if busy <= 1 else 'actors are'} rolling out"


def _held(state: RunState) -> str:
    """Return what holds the groups that are out; nothing where none is."""
    out = integer(state.monitor.values("storage"), "rolling_out")
    text = holders_text(state.of_role("actor")) if out else ""
    return f"; {text}" if text else ""


def waiting_actors(state: RunState) -> Iterator[str]:
    reasons: dict[str, int] = {}
    for actor in state.of_role("actor"):
        if waits_for_leases(actor):
            reason = _no_leases(state)
        elif actor.waits:
            reason = actor.text
        else:
            continue
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, number in reasons.items():
        yield f"{number} {'actor waits' if number == 1 else 'actors wait'}: {reason}"


def _no_leases(state: RunState) -> str:
    storage = state.statuses.get("storage")
    if storage is None or state.dispatcher is None:
        return f"storage did not answer within {LISTEN_S:g} s"
    leases = state.consumers.get("TASKS/rollout")
    if leases is not None and leases.num_pending:
        return f"{leases.num_pending} leases lie on the bus, which it is about to take"
    needed = state.config is not None and state.config.admission.ahead == "need"
    if storage.wait == "staleness" and not needed:
        bound = integer(storage.values, "max_staleness")
        version = "the newest version" if state.policy is None else f"version {state.policy.policy_version}"
        return f"the dispatcher holds leases back, staleness bound {bound} is reached by {version}"
    return f"storage says: {storage.text}"
