"""The live screen and the plain lines."""

import asyncio
import time
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console, Group
from rich.text import Text

from launch.dashboard.flow import flow
from launch.run_view.monitor import HeardProcess, PartEnding, RunMonitor
from launch.run_view.run_status import RunState
from launch.run_view.units import count, duration, fraction, size
from launch.screens import terminal_view as view
from launch.screens.terminal_view import MAX_LINES, News, TerminalView, screen, status_line
from tests.launch.messages import FACTS, MIB, Clock, actor, evaluation, learner, metrics, storage

LATE = "group 640, rolling out since version 17, must be trained by version 21"
WAITING = f"waiting for the batch: {LATE}"


def make_monitor(*, actors=2) -> tuple[RunMonitor, Clock]:
    clock = Clock()
    monitor = RunMonitor(FACTS, clock=clock)
    monitor.on_status(learner(doing="waiting for the batch", wait="batch", reason=LATE))
    monitor.on_status(storage())
    for n in range(actors):
        monitor.on_status(actor(n))
    monitor.on_event(evaluation(0, 0.02), time.time())
    for step in range(1, 21):
        monitor.on_event(metrics(step), time.time())
    monitor.on_event(evaluation(21, 0.6, 0.7), time.time())
    return monitor, clock


def shown(monitor: RunMonitor, width=80) -> list[str]:
    console = Console(file=StringIO(), width=width, force_terminal=True, record=True)
    console.print(Group(*screen(monitor, width)))
    return console.export_text().splitlines()


def test_screen_says_where_the_run_stands_and_who_waits():
    monitor, clock = make_monitor()
    clock.now_s += 3
    assert shown(monitor) == [
        "demo  reinforcement learning, step 20 of 400, policy v21  3.00 s",
        "reward     0.500 mean of the last 10 steps, latest 0.500",
        "held-out   0.600 sampled, 0.700 greedy at v21, target 0.900, was 0.020 at v0",
        "tokens/s   8642 generated, 3210 trained",
        "step time  2.00 s = 1.50 s training + 0.40 s waiting + 0.10 s publishing",
        "staleness  2 now, 3 worst, 4 allowed (policy versions)",
        "queues     64 groups rolling out, 12 stored; on the bus 31 leases, 2 results",
        "waiting    engines run 60 requests and 6 more queue, at 8642 tokens/s (144 each)",
        "rollouts   5216 trajectories published, 5120 trained on",
        "rejected   groups: 84 zero_variance, 6 rollout_failed",
        "episodes   -",
        "learner            waiting for the batch: group 640, rolling out since version",
        "                   17, must be trained by version 21 (0.977 GiB)",
        "storage            all that the bound allows is rolling out (200 MiB)",
        "actor-host-1000    generating; 30 running, 3 queued, 4321 tok/s, v21, 300 MiB",
        "actor-host-1001    generating; 30 running, 3 queued, 4321 tok/s, v21, 300 MiB",
    ]


def test_a_run_on_demonstrations_alone_has_no_rows_of_rewards():
    monitor = RunMonitor(replace(FACTS, steps=0, has_rollouts=False), clock=Clock())
    assert monitor.absent_roles == ["learner", "storage"]
    monitor.on_status(learner(stage="warmup", step=0, doing="training step 7"))
    line = "0.00 s: warm-up, step 100 of 100 | tokens/s 3210 trained | learner: training step 7"
    assert status_line(monitor) == line
    labels = [line.partition(" ")[0] for line in shown(monitor)]
    assert labels == ["demo", "tokens/s", "learner"]
    monitor.on_status(learner(stage="rl", step=0))
    assert shown(monitor)[0] == "demo  finishing  0.00 s"


def test_screen_writes_no_line_for_an_actor_that_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    written: list[str] = []
    line = view._process

    def counted(monitor: RunMonitor, process: HeardProcess, width: int, rows: int) -> list[Text]:
        written.append(process.status.source)
        return line(monitor, process, width, rows)

    monkeypatch.setattr(view, "_process", counted)
    monitor, _ = make_monitor(actors=1000)
    assert shown(monitor)[-1] == "... and 993 more"
    assert len(written) < 3 * MAX_LINES


def test_every_screen_says_what_share_of_episodes_the_surroundings_broke():
    monitor, clock = make_monitor(actors=0)
    monitor.on_status(actor(0, recent_ends={"completed": 90, "length": 10, "reward_error": 3}))
    monitor.on_status(actor(1, recent_ends={"completed": 90, "timeout": 7, "tool_error": "many"}))
    clock.now_s += 1
    text = "5% failed of 200 recent: 7 timeout, 3 reward_error"
    assert f"episodes   {text}" in shown(monitor)
    assert status_line(monitor).endswith(f"2 actors | episodes {text}")
    clock.now_s += 100  # silent actors are not counted
    assert "episodes   -" in shown(monitor)


def test_screen_before_anybody_spoke():
    lines = shown(RunMonitor(FACTS))
    assert lines[0].startswith("demo  starting")
    assert lines[2] == "held-out   not measured yet, target 0.900"
    wait = "no report yet: loading libraries takes several seconds"
    assert lines[-3:] == [f"{role:<18} {wait}" for role in ("learner", "storage", "actor")]
    assert status_line(RunMonitor(FACTS)) == f"0.00 s: starting | learner, storage, actor: {wait}"


def test_a_run_without_a_warm_up_does_not_say_that_it_is_in_one():
    monitor = RunMonitor(replace(FACTS, warmup_steps=0), clock=Clock())
    monitor.on_status(learner(stage="warmup", step=0, doing="joining the run"))
    assert status_line(monitor).startswith("0.00 s: starting | ")


def test_screen_names_the_processes_that_have_not_reported_until_the_learner_has():
    monitor = RunMonitor(FACTS)
    monitor.on_status(storage())
    monitor.on_status(actor())
    assert [line[:7] for line in shown(monitor)[-3:]] == ["learner", "storage", "actor-h"]
    assert "learner: no report yet" in status_line(monitor)
    for n in range(40):
        monitor.on_status(actor(n))
    assert len(shown(monitor)) == MAX_LINES
    monitor.on_status(learner())
    assert "no report yet" not in "\n".join([*shown(monitor), status_line(monitor)])


def test_screen_shows_silence_restarts_and_failures():
    monitor, clock = make_monitor(actors=1)
    clock.now_s += 8
    monitor.on_status(learner(doing="joining the run", pid=7))
    monitor.on_status(storage(dead=2, dead_reasons={"version": 2}))
    monitor.on_status(actor(1, failed=4))
    lines = shown(monitor)
    assert "learner            joining the run (0.977 GiB, start 2)" in lines
    assert "actor-host-1000    SILENT for 8.00 s, was: generating" in lines
    assert any("4 failed" in line for line in lines)
    assert "rejected   groups: 84 zero_variance, 6 rollout_failed; set aside: 2 version" in lines


def test_screen_shows_each_of_several_engines_and_one_that_was_restarted():
    monitor, _ = make_monitor(actors=0)
    serving = {"state": "serving", "running": 3, "waiting": 1, "policy_version": 7, "restarts": 0}
    waiting = {"state": "waiting", "running": 0, "waiting": 0, "policy_version": -1, "restarts": 2}
    begins = {"state": "starting", "starting": "capturing CUDA graphs", "policy_version": -1}
    monitor.on_status(actor(0, engines={"engine-0": serving, "engine-1": waiting, "engine-2": begins}))
    monitor.on_status(actor(1, engines={"engine-0": serving | {"restarts": 1}}))
    monitor.on_status(actor(2, engines={"engine-0": serving}))
    lines = "\n".join(shown(monitor, 200))
    assert "300 MiB; engine-0 3 running, 1 queued, v7; engine-1 waiting, restarted 2 times; engine-2" in lines
    assert "engine-2 starting (capturing CUDA graphs)" in lines.replace("\n" + " " * 19, " ")
    assert "300 MiB; engine-0 3 running, 1 queued, v7, restarted 1 times\n" in lines
    assert lines.endswith("v21, 300 MiB"), "a lone engine is its actor"


def test_screen_and_page_show_what_engines_tell_of_their_caches_and_drafts():
    monitor, _ = make_monitor(actors=0)
    told = {"kv_used_fraction": 0.43, "prefix_hit_fraction": 0.71, "accepted_tokens_per_pass": 2.345}
    monitor.on_status(actor(0, **told))
    figures = "43% of the KV cache used, 71% of prompt tokens cached, 2.35 tokens accepted a pass"
    assert f"4321 tok/s, {figures}, v21" in "\n".join(shown(monitor, 200))
    monitor.on_status(actor(1, kv_used_fraction=0.13))
    page = flow(RunState(monitor, 0.0))[1]["figures"]
    assert ["28%", "of the KV cache used"] in page
    assert ["2.35", "tokens accepted a pass"] in page, "of those that tell it"


def test_who_is_silent_once_the_run_is_done_is_told_so():
    monitor, clock = make_monitor()
    monitor.on_status(learner(stage="done"))
    clock.now_s += 10
    assert "learner            silent for 10.0 s, the run is done" in shown(monitor)
    assert " | learner: silent for 10.0 s, the run is done | " in status_line(monitor)


def test_a_screen_that_hears_nobody_of_a_run_with_steps_does_not_say_that_it_starts():
    clock = Clock()
    monitor = RunMonitor(FACTS, clock=clock)
    monitor.on_event(metrics(7), 0.0)
    clock.now_s += 4
    assert shown(monitor)[0] == "demo  learner not heard yet, step 7 recorded  4.00 s"
    unknown = "not heard for 4.00 s: it is starting, busy, cut off or not there"
    assert f"learner, storage, actor: {unknown}" in status_line(monitor)
    unheard = RunMonitor(FACTS, clock=clock)
    clock.now_s += 61
    assert "actor: not heard for 1 min 01 s: it is starting, busy" in status_line(unheard)


def test_a_bus_that_does_not_answer_the_screen_is_told_and_since_when():
    monitor, clock = make_monitor()
    clock.now_s += 40
    monitor.on_answer(True)
    clock.now_s += 7
    assert "bus" not in status_line(monitor), "nothing was asked meanwhile"
    monitor.on_answer(False)
    clock.now_s += 5
    assert shown(monitor)[1] == "bus        no answer for 12.0 s: what is shown is older"
    assert " | bus: no answer for 12.0 s: what is shown is older | " in status_line(monitor)
    monitor.on_answer(True)
    assert "bus" not in status_line(monitor)


def test_plain_lines_say_for_how_long_storage_has_been_silent():
    monitor, clock = make_monitor(actors=1)
    monitor.on_status(storage())
    assert "storage:" not in status_line(monitor)
    clock.now_s += 8
    monitor.on_status(learner())
    assert "| storage: silent for 8.00 s, was: all that the bound allows" in status_line(monitor)
    assert status_line(monitor).endswith("| no actors heard, 1 silent")


def test_a_stopped_process_has_ended_and_is_not_silent():
    monitor, clock = make_monitor()
    monitor.on_status(learner(doing="finishing a checkpoint", pid=7))
    clock.now_s += 10
    assert "learner            SILENT for 10.0 s, was: finishing a checkpoint" in shown(monitor)
    monitor.endings = {"learner": PartEnding(7, clock.now_s)}
    assert "learner            ended" in shown(monitor)


def test_a_part_that_failed_is_told_at_once_with_what_it_said_and_is_not_silent():
    monitor, clock = make_monitor()
    news = News(monitor)
    news.take()
    why = "cannot write checkpoint step_7: the disk is full"
    full = "the disk of runs/demo is full: free some"
    clock.now_s += 1
    monitor.full_disk = full
    # the status of another process id: a rank's, whose launcher is the part
    monitor.endings = {"learner": PartEnding(7, clock.now_s, why, "it starts again once the disk has room")}
    clock.now_s += 1
    words = f"ended: {why}; it starts again once the disk has room"
    assert news.take() == [full, f"learner: {words}"]
    line = status_line(monitor)
    assert line.index(f"| {full} |") < line.index(f"| learner: {words} |")
    clock.now_s += 100
    assert news.take() == [
        "storage: silent for 1 min 42 s, was: all that the bound allows is rolling out"
    ] + [f"actor-host-100{n}: silent for 1 min 42 s, was: generating" for n in range(2)]
    assert f"learner            {words}"[:80] in "\n".join(shown(monitor, 200))
    assert "learner: silent" not in status_line(monitor)

    monitor.full_disk = ""
    monitor.endings = {"learner": replace(monitor.endings["learner"], becomes="it was started again")}
    assert f"learner: ended: {why}; it was started again" in status_line(monitor)
    assert news.take() == [
        "the disk of the run has room again",
        f"learner: ended: {why}; it was started again",
    ]
    monitor.on_status(learner(doing="waiting for the batch", pid=8))
    assert "ended" not in status_line(monitor)
    assert news.take() == ["learner: started again, pid 8", "learner: speaks again"]


def test_a_part_that_failed_before_it_was_heard_loads_no_libraries():
    monitor = RunMonitor(FACTS, clock=Clock())
    monitor.endings = {"actors": PartEnding(7, 0.0, "signal SIGKILL")}
    unheard = "learner, storage: no report yet: loading libraries takes several seconds"
    assert f"| {unheard} | actor: ended: signal SIGKILL; it starts again" in status_line(monitor)
    assert shown(monitor)[-1] == "actor              ended: signal SIGKILL; it starts again"


def test_actors_of_other_hosts_have_not_ended_with_those_of_this_launch():
    monitor, clock = make_monitor(actors=2)
    own = monitor.processes["actor-host-1000"].status.pid
    clock.now_s += 1
    monitor.endings = {"actors": PartEnding(own, clock.now_s, "status 1")}
    failed = [source for source, process in monitor.processes.items() if monitor.failure(process)]
    assert failed == ["actor-host-1000"]
    assert "ended" not in status_line(monitor)
    monitor.on_status(monitor.processes["actor-host-1000"].status)  # nobody else was heard since
    assert "| actor-host-1000: ended: status 1; it starts again |" in status_line(monitor)


@pytest.mark.parametrize("actors", [0, 1, 5, 9, 10, 11, 200])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_screen_never_exceeds_its_lines_and_columns(actors, width):
    monitor, _ = make_monitor(actors=actors)
    lines = shown(monitor, width)
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= width


def test_screen_counts_the_processes_it_has_no_room_for():
    monitor, _ = make_monitor(actors=50)
    lines = shown(monitor)
    named = sum(line.startswith(("learner", "storage", "actor")) for line in lines)
    assert lines[-1] == f"... and {52 - named} more"


def test_markup_in_what_a_process_says_is_text():
    monitor, _ = make_monitor()
    monitor.on_status(learner(doing="[red]step[/red] [/nonsense]"))
    assert any("[red]step[/red] [/nonsense]" in line for line in shown(monitor))


def test_status_line_holds_the_essentials():
    line = status_line(make_monitor()[0])
    for part in (
        "step 20 of 400",
        "reward 0.500",
        "held-out 0.600 at v21",
        f"learner: {WAITING}",
        "2 actors",
    ):
        assert part in line


def test_line_goes_on_with_what_holds_the_groups_while_the_learner_waits_for_them():
    monitor, _ = make_monitor(actors=0)
    scoring = {"running": 0, "waiting": 0, "rewards_running": 64, "rewards_longest_s": 25.0, "reward_s": 30.0}
    monitor.on_status(actor(0, **scoring))
    text = "64 rewards run, the longest for 25.0 s; before, one took 30.0 s"
    assert status_line(monitor).endswith(f" | learner: {WAITING} | {text} | 1 actors")
    assert f"waiting    {text}" in shown(monitor)
    monitor.on_status(learner(doing="training step 21"))
    assert text not in status_line(monitor)


def test_versions_that_answered_for_another_are_named():
    monitor, _ = make_monitor()
    news = News(monitor)
    monitor.on_event(evaluation(0, 0.02, drawn_by=(1, 1)), time.time())
    monitor.on_event(evaluation(30, 0.91, 0.95, drawn_by=(31, 33)), time.time())
    assert "held-out reward: 0.910 sampled, 0.950 greedy at v30 (drawn by v31 to v33)" in news.take()
    assert "held-out 0.910 at v30 (drawn by v31 to v33) " in status_line(monitor)
    assert "was 0.020 at v0 (drawn by v1)" in "".join(shown(monitor, width=120))


def test_rollouts_that_failed_are_said_with_the_accuracy():
    monitor, _ = make_monitor()
    news = News(monitor)
    monitor.on_event(evaluation(29, 0.9, failed=1), time.time())
    monitor.on_event(evaluation(30, 0.91, 0.95, drawn_by=(31, 33), failed=12), time.time())
    told = news.take()
    assert "held-out reward: 0.900 sampled, 0.900 greedy at v29 (1 rollout failed)" in told
    told_of_30 = "0.910 sampled, 0.950 greedy at v30 (drawn by v31 to v33, 12 rollouts failed)"
    assert f"held-out reward: {told_of_30}" in told


def test_news_comes_once():
    monitor, _ = make_monitor(actors=1)
    news = News(monitor)
    assert news.take() == [
        "learner: started, pid 1",
        "storage: started, pid 2",
        "actor-host-1000: started, pid 1000",
    ]
    assert news.take() == []
    monitor.on_status(learner(stage="done", pid=5))
    monitor.on_event(evaluation(30, 0.91, 0.95), time.time())
    assert news.take() == [
        "stage: reinforcement learning -> done",
        "held-out reward: 0.910 sampled, 0.950 greedy at v30",
        "learner: started again, pid 5",
    ]


def test_news_tells_silence_and_its_end():
    monitor, clock = make_monitor(actors=1)
    news = News(monitor)
    news.take()
    clock.now_s += 6
    monitor.on_status(learner())
    monitor.on_status(storage())
    assert news.take() == ["actor-host-1000: silent for 6.00 s, was: generating"]
    assert news.take() == []
    monitor.on_status(actor(0))
    assert news.take() == ["actor-host-1000: speaks again"]


def test_an_alarm_is_on_the_screen_and_in_the_news_until_it_is_over():
    monitor, _ = make_monitor(actors=1)
    news = News(monitor)
    news.take()
    alarm = "engine-0 says that it has version 4, but it samples as version 3 did"
    monitor.on_status(actor(0, alarm=alarm))
    shown_lines = " ".join(line.strip() for line in shown(monitor))
    assert f"ALARM: {alarm}" in shown_lines
    assert news.take() == [f"actor-host-1000: ALARM: {alarm}"]
    assert news.take() == []
    monitor.on_status(actor(0, alarm=""))
    assert "ALARM" not in " ".join(shown(monitor))
    assert news.take() == ["actor-host-1000: the alarm is over"]


def test_data_sets_sources_and_the_best_checkpoint_have_rows():
    monitor, _ = make_monitor(actors=1)
    best = {"metric": "aime/pass@4", "value": 0.5, "policy_version": 11, "step": 10}
    monitor.on_status(learner(best=best))
    sources = {"math": {"share": 0.75, "solved": 0.5}, "chat": {"share": 0.25}}
    monitor.on_status(storage(sources=sources))
    monitor.on_event(evaluation(19, 0.25, 0.5, data_set="aime", scores={"pass@4": 0.5, "pass^4": 0.0}), 1.0)
    text = "\n".join(shown(monitor))
    assert "aime       0.250 sampled, 0.500 greedy at v19, 2 versions behind, 0.500 pass@4" in text
    assert "best       0.500 aime/pass@4 at v11, checkpoint of step 10" in text
    assert "sources    math 75% (0.500 solved), chat 25% (- solved)" in text
    news = News(monitor)
    news.take()
    monitor.on_event(evaluation(20, 0.5, data_set="aime"), 2.0)
    assert news.take() == ["aime: 0.500 sampled, 0.500 greedy at v20, 1 version behind"]


async def run_view(console: Console, monitor: RunMonitor) -> None:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(TerminalView(monitor, console).run(stop))
        await asyncio.sleep(0.05)
        monitor.on_event(evaluation(22, 0.65), time.time())
        stop.set()


async def test_without_a_terminal_each_line_is_whole():
    file = StringIO()
    await run_view(Console(file=file, width=80), make_monitor(actors=1)[0])
    lines = file.getvalue().splitlines()
    assert lines[:3] == [
        "learner: started, pid 1",
        "storage: started, pid 2",
        "actor-host-1000: started, pid 1000",
    ]
    assert "step 20 of 400" in lines[3]
    assert lines[4] == "held-out reward: 0.650 sampled, 0.650 greedy at v22"
    assert "held-out 0.650 at v22" in lines[5]
    assert len(lines) == 6


async def test_on_a_terminal_the_last_screen_stays():
    file = StringIO()
    console = Console(
        file=file, width=80, height=30, force_terminal=True, _environ={"TERM": "xterm"}, color_system=None
    )
    await run_view(console, make_monitor()[0])
    assert "held-out   0.650 sampled" in file.getvalue().rsplit("demo", 1)[1]
    assert file.getvalue().endswith("\x1b[?25h")  # the cursor is visible again


async def test_a_dumb_terminal_gets_plain_lines():
    file = StringIO()
    console = Console(file=file, width=80, force_terminal=True, _environ={"TERM": "dumb"})
    await run_view(console, make_monitor()[0])
    assert "\x1b[1A" not in file.getvalue()
    assert "learner: started, pid 1" in file.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950.4, "950"), (9999, "9999"), (12_345, "12.3k"), (999_951, "1M"), (4.56e6, "4.56M"),
     (7.8e9, "7.8G"), (None, "-"), (float("nan"), "-")],
)  # fmt: skip
def test_counts_have_at_most_four_digits(value, text):
    assert count(value) == text


def test_units():
    assert [size(x) for x in (0, 512, 1500, 300 * MIB, 2.3 * 1024 * MIB)] == [
        "0 B",
        "512 B",
        "1.46 KiB",
        "300 MiB",
        "2.3 GiB",
    ]
    assert [duration(x) for x in (0.416, 12.34, 59.96, 485, 3 * 3600 + 1234, None)] == [
        "0.42 s",
        "12.3 s",
        "1 min 00 s",
        "8 min 05 s",
        "3 h 20 min",
        "-",
    ]
    assert fraction(None) == fraction(float("nan")) == "-"
