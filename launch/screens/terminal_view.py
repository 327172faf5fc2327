"""The terminal view of a run: its progress, its rewards, and what each process waits for."""

import asyncio
import textwrap
import time
from collections.abc import Iterator, Mapping
from math import isfinite

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from bus.codec import Json
from bus.waiting import set_within
from launch.run_view.history import Evaluation, Step
from launch.run_view.monitor import HeardProcess, RunMonitor
from launch.run_view.status_texts import (
    best_text,
    ends_text,
    engine_texts,
    engines_of,
    holders_text,
    policy_text,
)
from launch.run_view.units import UNKNOWN, count, duration, fraction, size
from storage.metrics.records import integer, number

REFRESH_S = 0.5
LINE_S = 5.0
"""Time between two lines where there is no terminal; important changes are printed at once."""
MAX_LINES = 21
MOST_SETS = 3
"""Further data sets that the live screen has a row for."""
LABEL = 11
NAME = 18
STAGES = {"starting": "starting", "warmup": "warm-up", "rl": "reinforcement learning", "done": "done"}
ABSENT = "no report yet: loading libraries takes several seconds"
START_S = 60.0
"""Time after which a process of a new run that has not reported need not be one that starts."""


class TerminalView:
    """Shows `monitor` on `console` until stopped: a live screen on a terminal, else plain lines."""

    def __init__(self, monitor: RunMonitor, console: Console) -> None:
        self._monitor = monitor
        self._console = console

    async def run(self, stop: asyncio.Event) -> None:
        """Show until `stop`; the last screen stays."""
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            await self._run_live(stop)
        else:
            await self._run_plain(stop)

    async def _run_live(self, stop: asyncio.Event) -> None:
        with Live(console=self._console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                stopping = stop.is_set()
                lines = screen(self._monitor, self._console.width)
                # in a thread: a terminal held with Ctrl-S blocks its writer
                await asyncio.to_thread(live.update, Group(*lines), refresh=True)
                if stopping:
                    return
                await set_within(stop, REFRESH_S)

    async def _run_plain(self, stop: asyncio.Event) -> None:
        news, next_s = News(self._monitor), 0.0
        while True:
            stopping = stop.is_set()
            lines = news.take()
            if lines or stopping or time.monotonic() >= next_s:
                next_s = time.monotonic() + LINE_S
                lines.append(status_line(self._monitor))
            for line in lines:
                self._console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)
            if stopping:
                return
            await set_within(stop, REFRESH_S)


# --- the live screen ---


def screen(monitor: RunMonitor, width: int) -> list[Text]:
    """Return the screen, at most `MAX_LINES` lines of at most `width` columns."""
    lines = [_title(monitor), *_rows(monitor)]
    lines += _process_lines(monitor, width, max_lines=MAX_LINES - len(lines))
    for line in lines:
        line.no_wrap = True
        line.overflow = "ellipsis"
    return lines


def _title(monitor: RunMonitor) -> Text:
    line = Text(monitor.settings.name, style="bold")
    return line.append(f"  {_stage(monitor)}  {duration(monitor.elapsed_s)}", style="not bold")


def _stage(monitor: RunMonitor) -> str:
    learner, settings = monitor.values("learner"), monitor.settings
    stage = STAGES.get(monitor.stage, monitor.stage)
    if monitor.stage == "starting" and monitor.history.last and not learner:
        return f"learner not heard yet, step {monitor.history.last.step} recorded"
    if monitor.stage == "warmup":
        return f"{stage}, step {integer(learner, 'warmup_step')} of {settings.warmup_steps}"
    if settings.steps == 0 and monitor.stage in ("rl", "done"):  # the steps were those of the warm-up
        return "finishing" if monitor.stage == "rl" else stage
    if monitor.stage in ("rl", "done"):
        version = integer(learner, "policy_version")
        return f"{stage}, step {integer(learner, 'step')} of {settings.steps}, policy v{version}"
    return stage


def _bus(monitor: RunMonitor) -> str:
    """Return for how long the bus has not answered this screen; empty while it does."""
    silent_s = monitor.bus_silent_s
    return f"no answer for {duration(round(silent_s))}: what is shown is older" if silent_s else ""


def _rows(monitor: RunMonitor) -> Iterator[Text]:
    last = monitor.history.last
    if away := _bus(monitor):
        yield _row("bus", away)
    for name, policy in monitor.policies.items():
        yield _row(name[: LABEL - 1], policy_text(policy))
    recent, latest = monitor.history.recent_reward(), last.reward_mean if last else None
    if monitor.settings.steps:
        yield _row("reward", f"{fraction(recent)} mean of the last 10 steps, latest {fraction(latest)}")
    if monitor.settings.steps or monitor.history.evaluations:
        yield _row("held-out", _held_out(monitor))
    yield from (_row(label, text) for label, text in _measured(monitor))
    trained = count(monitor.trained_tokens_per_s)
    mfu = f", MFU {fraction(last.mfu)}" if last and isfinite(last.mfu) else ""
    yield _row("tokens/s", f"{count(monitor.generated_tokens_per_s)} generated, {trained} trained{mfu}")
    if monitor.settings.steps:
        yield from _rows_of_rollouts(monitor)
    elif monitor.full_disk:
        yield _row("waiting", monitor.full_disk)


def _rows_of_rollouts(monitor: RunMonitor) -> Iterator[Text]:
    learner, storage, last = monitor.values("learner"), monitor.values("storage"), monitor.history.last
    yield _row("step time", _step_time(last))
    yield _row("staleness", f"{_staleness(monitor)} (policy versions)")
    yield _row("queues", _queues(storage))
    if held := monitor.full_disk or _held(monitor):
        yield _row("waiting", held)
    published, used = count(monitor.trajectories_published), count(integer(learner, "trajectories_trained"))
    closed = integer(storage, "closed_short")
    short = f"; {count(closed)} groups closed short" if closed else ""
    yield _row("rollouts", f"{published} trajectories published, {used} trained on{short}")
    yield _row("rejected", _rejected(storage))
    if sources := _sources(storage):
        yield _row("sources", sources)
    yield _row("episodes", ends_text(monitor.recent_ends))


def _row(label: str, text: str) -> Text:
    return Text(f"{label:<{LABEL}}", style="cyan").append(text, style="default")


def _held_out(monitor: RunMonitor) -> str:
    target = monitor.settings.target_accuracy
    wanted = "" if target is None else f", target {fraction(target)}"
    evaluations = monitor.history.evaluations
    if not evaluations:
        return f"not measured yet{wanted}"
    first, *_ = evaluations.values()
    *_, last = evaluations.values()
    since = "" if first is last else f", was {fraction(first.sampled)} at {first.where}"
    return f"{_accuracy(last)}{_lag(last)}{wanted}{since}"


def _accuracy(evaluation: Evaluation) -> str:
    sampled, greedy = fraction(evaluation.sampled), fraction(evaluation.greedy)
    return f"{sampled} sampled, {greedy} greedy at {evaluation.where}"


def _measured(monitor: RunMonitor) -> Iterator[tuple[str, str]]:
    """Return what was measured last on each further data set, and the best checkpoint."""
    sets = monitor.history.sets
    for name, evaluations in list(sets.items())[:MOST_SETS]:
        *_, last = evaluations.values()
        yield name[: LABEL - 1], set_scores(last)
    if len(sets) > MOST_SETS:
        yield "...", f"and {len(sets) - MOST_SETS} more data sets: metrics.jsonl has all"
    if text := best_text(monitor.values("learner").get("best")):
        yield "best", text


def set_scores(evaluation: Evaluation) -> str:
    """Return the scores of a data set with the version, and how far the learner was past it."""
    shown = {name: value for name, value in evaluation.scores.items() if name.startswith("pass@")}
    scores = ", ".join(f"{fraction(value)} {name}" for name, value in shown.items())
    return f"{_accuracy(evaluation)}{_lag(evaluation)}{', ' + scores if scores else ''}"


def _lag(evaluation: Evaluation) -> str:
    """Return by how many versions the learner was past the one that was measured; empty for none."""
    if not evaluation.lag:
        return ""
    return f", {evaluation.lag} version{'s' if evaluation.lag > 1 else ''} behind"


def _step_time(step: Step | None) -> str:
    if step is None:
        return UNKNOWN
    parts = (step.training_s, "training"), (step.waiting_s, "waiting"), (step.publish_stall_s, "publishing")
    return f"{duration(step.step_s)} = " + " + ".join(f"{duration(part)} {name}" for part, name in parts)


def _staleness(monitor: RunMonitor) -> str:
    last = monitor.history.last
    now = count(last.staleness_max) if last else UNKNOWN
    worst = integer(monitor.values("learner"), "max_staleness_seen")
    return f"{now} now, {worst} worst, {monitor.max_staleness_allowed} allowed"


def _queues(storage: dict[str, Json]) -> str:
    if not storage:
        return UNKNOWN
    return (
        f"{integer(storage, 'rolling_out')} groups rolling out, {integer(storage, 'stored')} stored; "
        f"on the bus {integer(storage, 'tasks_pending')} leases, "
        f"{integer(storage, 'trajectories_pending')} results"
    )


def _held(monitor: RunMonitor) -> str:
    """Return what holds the groups that a learner without its batch waits for; empty when it does not."""
    latest = monitor.processes.get("learner")
    waits = latest is not None and latest.status.wait == "batch"
    if not waits or not integer(monitor.values("storage"), "rolling_out"):
        return ""
    return holders_text([actor.status for actor in monitor.actors()])


def _rejected(storage: dict[str, Json]) -> str:
    reasons = storage.get("reasons")
    found = reasons.items() if isinstance(reasons, dict) else ()
    groups = ", ".join(f"{number} {reason}" for reason, number in found)
    dead, kinds = integer(storage, "dead"), storage.get("dead_reasons")
    why = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) if isinstance(kinds, dict) else ""
    return (f"groups: {groups}" if groups else "none") + (f"; set aside: {why or dead}" if dead else "")


def _sources(storage: dict[str, Json]) -> str:
    """Return the share of each source of prompts, and how much of it is solved; empty without sources."""
    found = storage.get("sources")
    sources = found.items() if isinstance(found, dict) else ()
    return ", ".join(
        f"{name} {number(figures, 'share'):.0%} ({fraction(number(figures, 'solved'))} solved)"
        for name, figures in sources
        if isinstance(figures, dict)
    )


# --- one line a process ---


def _process_lines(monitor: RunMonitor, width: int, max_lines: int) -> list[Text]:
    """Return the lines of every process, or of as many as fit and how many more there are."""
    shown = monitor.shown()
    absent = [Text(f"{role:<{NAME}} {text}", style="yellow") for role, text in _absent(monitor).items()]
    max_lines -= len(absent)
    left = len(shown) - max_lines + 1
    if len(shown) > max_lines:  # of many processes, only as many as fit are put into words
        blocks = [_process(monitor, process, width, rows=1) for process in shown[: max_lines - 1]]
        blocks.append([Text(f"... and {left} more", style="dim")])
    else:
        blocks = [_process(monitor, process, width, rows=2) for process in shown]
        if sum(map(len, blocks)) > max_lines:
            blocks = [_process(monitor, process, width, rows=1) for process in shown]
    return [*absent, *(line for block in blocks for line in block)]


def _process(monitor: RunMonitor, process: HeardProcess, width: int, rows: int) -> list[Text]:
    ended, failure = monitor.has_ended(process), monitor.failure(process)
    silence = 0.0 if ended or failure else monitor.silent_s(process)
    style = "red" if silence else "yellow" if process.status.waits else "green"
    style = "dim" if ended else "red" if failure or _alarm(process) else style
    head = f"{_short(process.status.source):<{NAME}} "
    wrapped = textwrap.wrap(
        _end(monitor, process) if ended else failure or _activity(process, silence),
        max(20, width - len(head)),
        max_lines=rows,
        placeholder="...",
    )
    first, *others = wrapped or [""]
    lines = [Text(head, style=f"bold {style}").append(first, style=f"not bold {style}")]
    return lines + [Text(" " * len(head) + other, style=style) for other in others]


def _activity(process: HeardProcess, silence_s: float) -> str:
    status = process.status
    if silence_s:
        return f"SILENT for {duration(round(silence_s))}, was: {status.text}"
    if alarm := _alarm(process):
        return f"ALARM: {alarm}; {status.text}"
    again = f", start {process.starts}" if process.starts > 1 else ""
    if status.role != "actor":
        return f"{status.text} ({size(status.peak_rss_bytes)}{again})"
    values = status.values
    running, waiting = integer(values, "running"), integer(values, "waiting")
    rate, version = count(number(values, "generated_tokens_per_s")), integer(values, "policy_version")
    failed = f", {integer(values, 'failed')} failed" if integer(values, "failed") else ""
    load = f"{running} running, {waiting} queued{failed}, {rate} tok/s"
    load += "".join(f", {value} {label}" for value, label in engine_texts([values]))
    return f"{status.text}; {load}, v{version}, {size(status.peak_rss_bytes)}{_engines(values)}"


def _alarm(process: HeardProcess) -> str:
    return str(process.status.values.get("alarm", ""))


def _engines(values: Mapping[str, Json]) -> str:
    """Return what each engine of an actor does, when there are several or one was restarted."""
    engines = engines_of(values)
    if len(engines) == 1 and not any(integer(engine, "restarts") for engine in engines.values()):
        return ""
    return "".join(f"; {name} {_engine(engine)}" for name, engine in engines.items())


def _engine(engine: Mapping[str, Json]) -> str:
    restarts = integer(engine, "restarts")
    again = f", restarted {restarts} times" if restarts else ""
    if engine.get("state") != "serving":
        doing = f" ({engine['starting']})" if engine.get("starting") else ""
        return f"{engine.get('state')}{doing}{again}"
    running, waiting = integer(engine, "running"), integer(engine, "waiting")
    return f"{running} running, {waiting} queued, v{integer(engine, 'policy_version')}{again}"


def _short(source: str) -> str:
    """Shorten a long name to its end, which holds the process id."""
    return source if len(source) < NAME else f"..{source[-(NAME - 3) :]}"


# --- plain lines ---


def _doing(monitor: RunMonitor, process: HeardProcess) -> str:
    """Return what a process says that it does, or for how long it has said nothing."""
    if failure := monitor.failure(process):
        return failure
    if monitor.has_ended(process):
        return _end(monitor, process)
    silent_s = monitor.silent_s(process)
    return f"{_silent_for(silent_s)}, was: {process.status.text}" if silent_s else process.status.text


def _actors(monitor: RunMonitor) -> str:
    """Return how many actors are heard, and how many were within a minute."""
    heard = len(monitor.actors())
    silent = sum(process.status.role == "actor" for process in monitor.shown()) - heard
    return f"{heard or 'no'} actors{' heard' if not heard else ''}{f', {silent} silent' if silent else ''}"


def _silent_for(silent_s: float) -> str:
    return f"silent for {duration(round(silent_s))}"


def _end(monitor: RunMonitor, process: HeardProcess) -> str:
    """Return that a process has ended, where this launch saw it; else that it is silent after the run."""
    if (ending := monitor.ending(process)) is not None:
        return ending.text
    return f"{_silent_for(monitor.silent_s(process))}, the run is done"


def _is_said(monitor: RunMonitor, process: HeardProcess) -> bool:
    """Tell whether a plain line says what a process does: the learner always, storage while it is silent, and
    others that failed until another of their role is heard."""
    role = process.status.role
    is_silent = role == "storage" and monitor.silent_s(process) > 0
    return role == "learner" or is_silent or bool(monitor.failure(process) and monitor.is_latest(process))


def _absent(monitor: RunMonitor) -> dict[str, str]:
    """Return what is known of each role of which no process was heard since this screen began."""
    starts = not monitor.history.steps and monitor.elapsed_s < START_S
    away = f"not heard for {duration(monitor.elapsed_s)}: it is starting, busy, cut off or not there"
    unheard = ABSENT if starts else away
    return {role: monitor.failure_unheard(role) or unheard for role in monitor.absent_roles}


def _absent_in_line(monitor: RunMonitor) -> list[str]:
    """Return the same for a plain line, with all roles of which the same is known in one part."""
    known: dict[str, list[str]] = {}
    for role, text in _absent(monitor).items():
        known.setdefault(text, []).append(role)
    return [f"{', '.join(roles)}: {text}" for text, roles in known.items()]


def status_line(monitor: RunMonitor) -> str:
    reward, evaluations = monitor.history.recent_reward(), monitor.history.evaluations
    latest = evaluations[next(reversed(evaluations))] if evaluations else None
    held_out = "" if latest is None else f"{fraction(latest.sampled)} at {latest.where}"
    settings, storage = monitor.settings, monitor.values("storage")
    groups = f"groups {integer(storage, 'rolling_out')} rolling out, {integer(storage, 'stored')} stored"
    trains_on_rollouts = settings.steps > 0 and monitor.stage in ("rl", "done")
    generated = f"{count(monitor.generated_tokens_per_s)} generated, " if settings.has_rollouts else ""
    trained = count(monitor.trained_tokens_per_s)
    ends = ends_text(monitor.recent_ends)
    parts = [
        f"{duration(monitor.elapsed_s)}: {_stage(monitor)}",
        *([f"bus: {away}"] if (away := _bus(monitor)) else []),
        *filter(None, [monitor.full_disk]),
        *([f"reward {fraction(reward)}"] if isfinite(reward) else []),
        *([f"held-out {held_out}"] if latest else []),
        *([f"tokens/s {generated}{trained} trained"] if monitor.stage != "starting" else []),
        *([f"staleness {_staleness(monitor)}", groups] if trains_on_rollouts else []),
        *(f"{p.status.source}: {_doing(monitor, p)}" for p in monitor.shown() if _is_said(monitor, p)),
        *_absent_in_line(monitor),
        *filter(None, ["" if monitor.full_disk else _held(monitor)]),
        *([_actors(monitor)] if settings.has_rollouts and "actor" not in monitor.absent_roles else []),
        *([f"episodes {ends}"] if ends != UNKNOWN else []),
    ]
    return " | ".join(parts)


class News:
    """Changes since they were last asked for: stage, evaluations, processes that come and go."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor
        self._stage = monitor.stage
        self._evaluations = dict(monitor.history.evaluations)
        self._sets = {name: dict(of) for name, of in monitor.history.sets.items()}
        self._starts: dict[str, int] = {}
        self._away: dict[str, str] = {}
        """Processes that are silent, with an empty text, or that failed, with the words for that."""
        self._full_disk = ""
        self._alarms: set[str] = set()

    def take(self) -> list[str]:
        """Return a line for each change since the last call."""
        changes = self._disk_changes, self._stage_changes, self._evaluation_changes, self._process_changes
        return [line for each in changes for line in each()]

    def _disk_changes(self) -> Iterator[str]:
        before, self._full_disk = self._full_disk, self._monitor.full_disk
        if bool(before) is not bool(self._full_disk):
            yield self._full_disk or "the disk of the run has room again"

    def _stage_changes(self) -> Iterator[str]:
        before, self._stage = self._stage, self._monitor.stage
        if before != self._stage:
            yield f"stage: {STAGES.get(before, before)} -> {STAGES.get(self._stage, self._stage)}"

    def _evaluation_changes(self) -> Iterator[str]:
        before, self._evaluations = self._evaluations, dict(self._monitor.history.evaluations)
        for version, evaluation in self._evaluations.items():
            if before.get(version) != evaluation:
                yield f"held-out reward: {_accuracy(evaluation)}"
        known, self._sets = self._sets, {name: dict(of) for name, of in self._monitor.history.sets.items()}
        for name, found in self._sets.items():
            for version, evaluation in found.items():
                if known.get(name, {}).get(version) != evaluation:
                    yield f"{name}: {set_scores(evaluation)}"

    def _process_changes(self) -> Iterator[str]:
        processes = self._monitor.processes
        for source in self._starts.keys() - processes.keys():  # an actor that is forgotten
            del self._starts[source]
        for source in self._away.keys() - processes.keys():
            del self._away[source]
        for source, process in processes.items():
            known, self._starts[source] = self._starts.get(source, 0), process.starts
            if process.starts > known:
                yield f"{source}: {'started again' if known else 'started'}, pid {process.status.pid}"
            yield from self._absence_changes(source, process)
            if (alarm := _alarm(process)) and source not in self._alarms:
                self._alarms.add(source)
                yield f"{source}: ALARM: {alarm}"
            elif not alarm and source in self._alarms:
                self._alarms.remove(source)
                yield f"{source}: the alarm is over"

    def _absence_changes(self, source: str, process: HeardProcess) -> Iterator[str]:
        before, failure = self._away.get(source), self._monitor.failure(process)
        if not failure and not self._monitor.silent_s(process):
            if self._away.pop(source, None) is not None:
                yield f"{source}: speaks again"
        elif before is None or (failure and failure != before):
            self._away[source] = failure
            yield f"{source}: {_doing(self._monitor, process)}"
