"""A program of somebody's as an environment: what it finds, what it may not, and how its end is told."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from actors.engines.base import Sampling
from actors.environments.agent import AgentEnvironment
from actors.environments.build import build_environment
from actors.episodes.episode import Episode
from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task
from actors.gateway.posted_reward import PostedReward
from actors.policy.policy import Policy
from actors.programs.runner import ProgramRunner
from actors.rewards.base import RewardError
from actors.rollouts.worker import end_after
from actors.settings.agents import AgentConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError, EngineError, HandBackError
from bus.process import plugins
from bus.process.plugins import ImportPolicy
from tests.actors.environments.agent_programs import HEAD, running
from tests.actors.gateway.served import TOKENIZER, script, until

TASK = Task(task_id="g00000000.0", prompt="say fine", label="fine", metadata={"level": 1})


class Setting:
    """An environment around a program, with an engine that answers "fine"."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finish_within_s = 30.0
        self.engine = ScriptedEngine(script(lambda _: "fine"))
        self.policy = Policy(self.engine, TOKENIZER, Sampling(max_new_tokens=64))

    @asynccontextmanager
    async def running(self, program: str, **settings) -> AsyncIterator[AgentEnvironment]:
        self.path.write_text(HEAD + program)
        command = f"{sys.executable} -S {self.path}"
        owned = {"reward": "posted", "program_owns_reward": settings.get("reward", "posted") == "posted"}
        isolation = {"writable": (self.path.parent,)}
        environment = AgentEnvironment.from_config(
            AgentConfig(**{"command": command, **owned, "isolation": isolation, **settings}),
            finish_within_s=self.finish_within_s,
        )
        try:
            yield environment
        finally:
            await environment.close()

    async def run(self, program: str, **settings) -> Episode:
        async with self.running(program, **settings) as environment:
            return await environment.run(TASK, self.policy)


@pytest.fixture
def agent(tmp_path: Path) -> Setting:
    return Setting(tmp_path / "agent.py")


async def test_program_gets_its_task_and_is_recorded_with_the_reward_it_posts(agent: Setting):
    episode = await agent.run("""
assert task == {"task_id": "g00000000.0", "prompt": "say fine", "metadata": {}}
assert given["metadata"] == {"level": 1}
reward({"reward": float(ask(task["prompt"]) == given["label"]), "components": {"style": 0.5}})
""")
    [trajectory] = episode.trajectories
    assert (trajectory.reward, trajectory.end) == (1.0, "completed")
    assert trajectory.reward_source == "program 127.0.0.1"
    assert trajectory.reward_components == {"style": 0.5}
    assert trajectory.loss_mask.sum() == 5


async def test_reward_function_judges_the_last_answer_and_the_label_stays_here(agent: Setting):
    program = 'assert "label" not in task and not given\nask("first")\nask("say")'
    episode = await agent.run(program, reward="exact")
    assert [trajectory.reward for trajectory in episode.trajectories] == [1.0, 1.0]


@pytest.mark.parametrize("shown", [(), ("level",)])
async def test_policy_reads_no_field_of_the_metadata_that_the_settings_do_not_name(agent: Setting, shown):
    hidden = ("solution", "reference_answer", "tests", "answers", "correct_letter", "reasoning_gym")
    task = replace(TASK, metadata={"level": 1, **dict.fromkeys(hidden, "LABEL")})
    program = f"""
assert task["metadata"] == { ({"level": 1} if shown else {})!r}
assert "LABEL" not in str([dict(os.environ), sys.argv, task, given])
ask("hi")
"""
    async with agent.running(program, reward="exact", shown_metadata=shown) as environment:
        with capture_logs() as logs:
            await environment.run(task, agent.policy)
    [told] = [entry["fields"] for entry in logs if entry["event"] == "metadata_is_not_shown"]
    assert ("level" in told, "solution" in told) == (not shown, True)


SEEN = []


def seen(answer):
    SEEN.append((answer.text, answer.finish_reason))
    return 1.0


def denied(call):
    return "the hook denied it"


@pytest.fixture
def users_functions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "users_functions", sys.modules[__name__])
    SEEN.clear()


@pytest.mark.usefixtures("users_functions")
async def test_reward_function_is_told_of_a_last_answer_that_was_cut(agent: Setting):
    agent.policy = Policy(agent.engine, TOKENIZER, Sampling(max_new_tokens=2))
    await agent.run("ask('hi')", reward="users_functions:seen")
    assert SEEN == [("fi", "length")]


@pytest.mark.usefixtures("users_functions")
async def test_reward_function_sees_the_policys_own_words_and_not_the_hooks(agent: Setting):
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    agent.policy = Policy(ScriptedEngine(script(lambda _: f"mine{call}")), TOKENIZER, Sampling())
    program = """
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
assert "the hook denied it" in answer["choices"][0]["message"]["content"]
"""
    hook = {"tool_hook": "users_functions:denied"}
    await agent.run(program, reward="users_functions:seen", gateway=hook)
    assert SEEN == [("mine", "stop")]


@pytest.mark.parametrize("retried", [False, True])
async def test_what_a_program_leaves_behind_at_the_engine_is_not_trained(agent: Setting, retried):
    """A thread of the program asks and is never answered; its client would have tried again."""
    agent.policy = Policy(engine := Held("slow", agent.engine), TOKENIZER, Sampling(max_new_tokens=64))
    header = ', "x-stainless-retry-count": "0"' if retried else ""
    program = f'''
def post(url, body):
    key = os.environ["OPENAI_API_KEY"]
    headers = {{"Authorization": "Bearer " + key, "Content-Type": "application/json"{header}}}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=20))
ask("first")
import threading
threading.Thread(target=ask, args=("slow",), daemon=True).start()
while not os.path.exists({str(engine.path(agent))!r}): time.sleep(0.01)
'''
    async with agent.running(program) as environment:
        rollout = asyncio.create_task(environment.run(TASK, agent.policy))
        await until(lambda: engine.is_asked, "the request that is left behind")
        [session] = environment._gateway._sessions.values()
        engine.path(agent).touch()
        await until(lambda: session._is_closed, "the end of the program")
        engine.go.set()
        session.post_reward(PostedReward(reward=1.0), "here")
        episode = await rollout
    assert ["first" in TOKENIZER.decode(t.token_ids) for t in episode.trajectories if t.is_trained] == [True]
    assert not any("slow" in TOKENIZER.decode(t.token_ids) for t in episode.trajectories if t.is_trained)


class Held:
    """An engine that answers a prompt with a certain word when it is told to."""

    def __init__(self, word: str, engine: ScriptedEngine) -> None:
        self.go = asyncio.Event()
        self.is_asked = False
        self._word, self._engine = word, engine

    @staticmethod
    def path(agent: Setting) -> Path:
        """The file for which the program waits before it ends."""
        return agent.path.with_name("may_end")

    async def generate(self, request):
        if self._word in TOKENIZER.decode(list(request.token_ids)):
            self.is_asked = True
            await self.go.wait()
        return await self._engine.generate(request)


async def test_program_inherits_neither_bus_nor_keys(agent: Setting, monkeypatch: pytest.MonkeyPatch):
    secrets = (
        "SLUICE_BUS", "SLUICE_CREDS", "OPENAI_ORG_ID", "ANTHROPIC_AUTH_TOKEN", "HF_TOKEN", "JUDGE_KEY",
        "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "PIP_INDEX_URL", "HTTP_PROXY", "SSH_AUTH_SOCK", "HF_HOME",
    )  # fmt: skip
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LC_TIME", "C")
    await agent.run(
        """
assert "secret" not in os.environ.values(), os.environ
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"]
assert (os.environ["MINE"], sys.stdin.read()) == ("yes", "")
assert (os.environ["HF_HUB_OFFLINE"], os.environ["LC_TIME"]) == ("1", "C")
assert os.environ["HOME"] == os.getcwd() != os.environ["TMPDIR"]
ask("hi")
reward(1)
""",
        variables={"MINE": "yes"},
        inherited_variables=("HF_HUB_OFFLINE", "NOT_SET"),
    )


@pytest.mark.parametrize(
    ("program", "reason", "end"),
    [
        ("ask('hi'); sys.exit('all is lost')", "status 1: all is lost", "environment_error"),
        ("ask('hi'); os.kill(os.getpid(), 9)", "status -9", "environment_error"),
        ("reward(1)", "asked the policy nothing", "environment_error"),
        ("ask('hi')\nwhile True: print('x' * 999)", "wrote more than 4096 bytes", "environment_error"),
        ("sys.stdout.buffer.write(b'\\xff'); sys.exit(3)", "status 3: \ufffd", "environment_error"),
    ],
)
async def test_program_that_fails_is_no_episode_of_reward_0(agent: Setting, program, reason, end):
    with pytest.raises(EpisodeError, match=reason) as failed:
        await agent.run(program, most_output_bytes=4096)
    assert end_after(failed.value) == end


async def test_program_that_hangs_is_ended_with_its_children(agent: Setting, tmp_path):
    program = tmp_path / "agent.sh"
    program.write_text("setsid sleep 60.017 & echo still here; sleep 60.017\n")
    environment = AgentEnvironment.from_config(AgentConfig(command=f"sh {program}", program_timeout_s=3.0))
    with pytest.raises(EpisodeError, match=r"it ran for 3 s; its last output: still here") as failed:
        await environment.run(TASK, agent.policy)
    await environment.close()
    assert end_after(failed.value) == "timeout"
    assert not running("60.017")
    assert not running(str(program))


@pytest.mark.parametrize("allows_namespaces", [True, False])
async def test_daemon_in_a_session_of_its_own_ends_with_its_program(
    agent: Setting, monkeypatch: pytest.MonkeyPatch, allows_namespaces
):
    monkeypatch.setattr(ProgramRunner, "_probe", lambda _: allows_namespaces)
    await agent.run("""
import subprocess
for _ in range(3):
    subprocess.run("nohup setsid sleep 60.781 & setsid setsid sleep 60.781 & disown", shell=True)
ask("hi")
reward(1)
""")
    assert not running("60.781")


async def test_cancelled_rollout_ends_its_program(agent: Setting, tmp_path):
    began = tmp_path / "began"
    program = f"open({str(began)!r}, 'w').close()\ntime.sleep(60)"
    async with agent.running(program) as environment:
        rollout = asyncio.create_task(environment.run(TASK, agent.policy))
        await until(began.exists, "the program")
        rollout.cancel()
        await asyncio.wait([rollout])
        assert rollout.cancelled()
        assert not running(str(agent.path))


async def test_held_out_tasks_have_places_of_their_own(agent: Setting):
    agent.engine.hold()
    async with agent.running("reward(len(ask('hi')))", programs_at_once=1) as environment:
        rollouts = [
            asyncio.create_task(environment.run(replace(TASK, heldout=heldout), agent.policy))
            for heldout in (True, True, False, False)
        ]
        await until(lambda: agent.engine.running == 2, "a program of each kind")
        agent.engine.release()
        await asyncio.gather(*rollouts)
    assert len(agent.engine.requests) == 4


@pytest.mark.parametrize(
    ("ending", "limit_s"),
    [("sys.exit(3)", 60.0), pytest.param("time.sleep(60)", 8.0, marks=pytest.mark.slow)],
)
async def test_program_that_fails_or_outlives_its_time_has_the_reward_that_the_settings_state(
    agent, ending, limit_s
):
    """Also where no other program has ended well."""
    episode = await agent.run(f"ask('hi')\n{ending}", failed_reward=-0.5, program_timeout_s=limit_s)
    [trajectory] = episode.trajectories
    assert (trajectory.reward, trajectory.reward_source) == (-0.5, "settings")


async def test_stop_ends_what_runs_in_its_time_and_begins_nothing_that_waits(agent, tmp_path):
    agent.finish_within_s = 0.1
    pids, stop = tmp_path / "pids", asyncio.Event()
    program = f'open({str(pids)!r}, "a").write(f"{{os.getpid()}} ")\ntime.sleep(60)'
    async with agent.running(program, programs_at_once=2) as environment:
        environment.stop_with(stop)
        rollouts = [asyncio.create_task(environment.run(TASK, agent.policy)) for _ in range(4)]
        await until(lambda: pids.exists() and pids.read_text().count(" ") == 2, "two programs")
        stop.set()
        async with asyncio.timeout(30):
            outcomes = await asyncio.gather(*rollouts, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [HandBackError] * 4
        with pytest.raises(HandBackError, match=r"no program was started for task g00000000\.0"):
            await environment.run(TASK, agent.policy)
    assert pids.read_text().count(" ") == 2
    assert not running(str(agent.path))


async def test_program_that_is_done_soon_after_the_stop_gives_its_episode(agent: Setting):
    agent.engine.hold()
    async with agent.running("reward(len(ask('hi')))") as environment:
        environment.stop_with(stop := asyncio.Event())
        rollout = asyncio.create_task(environment.run(TASK, agent.policy))
        await until(lambda: agent.engine.running == 1, "its question")
        stop.set()
        await asyncio.sleep(0)
        agent.engine.release()
        assert (await rollout).trajectories[0].reward == 4.0


async def test_failure_of_the_engine_is_told_as_such_whatever_the_program_does(agent: Setting):
    agent.engine.fail("broken")
    for program in ("ask('hi')", "try: ask('hi')\nexcept OSError: reward(0)"):
        with pytest.raises(EngineError, match="broken"):
            await agent.run(program)


async def test_program_that_posts_no_reward_has_none(agent: Setting):
    with pytest.raises(RewardError, match="reward_url"):
        await agent.run("ask('hi')", reward_timeout_s=0.01)


async def test_reward_may_come_after_the_program_has_ended(agent: Setting):
    """A judge of its own posts it, whom the program told the address; it is no child of the program."""
    async with agent.running("ask('hi')") as environment:
        rollout = asyncio.create_task(environment.run(TASK, agent.policy))
        sessions = environment._gateway._sessions
        await until(lambda: any(session.last for session in sessions.values()), "the answer")
        [session] = sessions.values()
        url = environment._gateway.reward_url_of(session)
        post = f"import urllib.request as u; u.urlopen({url!r}, b'0.5')"
        posting = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", post)
        assert await posting.wait() == 0
        [trajectory] = (await rollout).trajectories
        assert trajectory.reward == 0.5


@pytest.mark.parametrize("unfinished", ["left_out", None, 0.0])
async def test_program_that_a_limit_cut_off_has_the_reward_set_for_that(agent: Setting, unfinished):
    settings = {"gateway": {"most_turns": 1}, "unfinished_reward": unfinished}
    program = "ask('hi'); ask('ho')"  # the second is refused, and ends it
    if unfinished in ("left_out", None):  # null in records of older builds
        with pytest.raises(RewardError):
            await agent.run(program, **settings)
    else:
        [trajectory] = (await agent.run(program, **settings)).trajectories
        assert (trajectory.end, trajectory.reward) == ("turn_limit", 0.0)


async def test_reward_by_agent_names_every_agent(agent: Setting):
    [trajectory] = (await agent.run("ask('hi'); reward({'reward': {'solver': 2, 'other': 0}})")).trajectories
    assert trajectory.reward == 2.0
    with pytest.raises(RewardError, match="names no solver"):
        await agent.run("ask('hi'); reward({'reward': {'other': 0}})")


async def test_only_so_many_programs_run_at_once(agent: Setting):
    agent.engine.hold()
    async with agent.running("reward(len(ask('hi')))", programs_at_once=2) as environment:
        rollouts = [asyncio.create_task(environment.run(TASK, agent.policy)) for _ in range(3)]
        await until(lambda: agent.engine.running == 2, "two programs")
        assert len(environment._gateway._sessions) == 2  # one is opened before its program starts
        agent.engine.release()
        assert [(await rollout).trajectories[0].reward for rollout in rollouts] == [4.0] * 3


async def test_a_host_that_cannot_hold_the_task_fails_the_episode(agent: Setting, monkeypatch, tmp_path):
    async with agent.running("ask('hi')") as environment:
        await environment._serve()
        monkeypatch.setattr(environment._runner, "_base", tmp_path / "gone/too")  # nobody makes "gone"
        with pytest.raises(EpisodeError, match="FileNotFoundError"):
            await environment.run(TASK, agent.policy)


def test_program_that_is_not_there_is_refused_at_start_up():
    config = AgentConfig(command="no-such-program --fast")
    with pytest.raises(ConfigError, match="no program 'no-such-program'"):
        build_environment(config)


def test_script_that_is_not_there_is_refused_at_start_up_with_the_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = AgentConfig(command="{python} -S my_agent.py --fast")
    with pytest.raises(ConfigError, match=rf"names my_agent\.py, which is no file in {tmp_path}: start"):
        build_environment(config)
    Path("my_agent.py").touch()
    build_environment(config)
    for command in ("{python} -m agent.py", "{python} -c pass.py", "true my.py", "{python} -X dev own.py"):
        build_environment(AgentConfig(command=command))


@pytest.mark.parametrize("command", ["", "  ", "python 'agent.py"])
def test_command_without_words_is_refused(command):
    with pytest.raises(ValueError, match="command"):
        AgentConfig(command=command)


@pytest.mark.parametrize(
    ("policy", "allowed"),
    [
        (ImportPolicy(refusal="comes from a stranger"), False),
        (ImportPolicy(directories=(Path("/srv/plugins"),)), False),
        (ImportPolicy(refusal="comes from a stranger", own=frozenset({"true"})), True),
        (ImportPolicy(directories=(Path("/srv/plugins"),), own=frozenset({"true"})), True),
        (ImportPolicy(), True),
    ],
)
def test_command_of_a_strangers_record_is_refused(monkeypatch, policy, allowed):
    monkeypatch.setattr(plugins, "_policy", policy)
    if allowed:
        build_environment(AgentConfig(command="true"))
    else:
        with pytest.raises(ConfigError, match=r"actors\.environment\.command='true'"):
            build_environment(AgentConfig(command="true"))


def test_variables_of_a_strangers_record_are_refused(monkeypatch):
    monkeypatch.setattr(
        plugins, "_policy", ImportPolicy(refusal="comes from a stranger", own=frozenset({"true"}))
    )
    with pytest.raises(ConfigError, match=r"variables\.LD_PRELOAD"):
        build_environment(AgentConfig(command="true", variables={"LD_PRELOAD": "/tmp/evil.so"}))
