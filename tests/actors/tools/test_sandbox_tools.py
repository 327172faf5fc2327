"""A shell, files and a Python session in the sandbox of an episode."""

import asyncio
import sys

import pytest
from structlog.testing import capture_logs

from actors.environments.prompt_choices import refuse_unknown_choices
from actors.episodes.errors import ToolError
from actors.episodes.task import Task
from actors.settings.actors import ActorsConfig
from actors.settings.episode_sandboxes import SandboxLimits
from actors.settings.sandbox_tools import SandboxToolConfig
from actors.settings.tool_chat import ToolsConfig
from actors.tools.base import ToolResult
from actors.tools.build import build_tools
from actors.tools.episode_tools import EpisodeTools
from bus.errors import ConfigError
from bus.messages import Prompt
from tests.actors.tools.sandbox_episodes import Episode


@pytest.fixture
async def tools():
    built = build_tools([SandboxToolConfig(output_kb=1)])
    yield built
    await built["shell"].close()


@pytest.fixture
async def episode(tools):
    one = Episode(tools, sandbox_files={"src/a.py": "x = 1\n"})
    yield one
    await one.close()


async def test_a_shell_keeps_directory_variables_and_programs(episode):
    assert await episode.said("shell", command="cat src/a.py; cd src; export A='b c'; sleep 60 &") == "x = 1"
    assert await episode.said(
        "shell", command='pwd; echo "$A"; jobs; kill -0 $(pgrep sleep) && echo runs'
    ) == ("/workspace/src\nb c\nruns")
    assert await episode("shell", command="echo out >&2; exit 3") == ToolResult(
        "out\n[status 3]", failed=True
    )
    assert await episode("shell", command="if") == await episode(
        "shell", command="if"
    )  # it is told, and goes on
    much = await episode("shell", command="yes")
    assert much.text.endswith("y\n[stopped: it wrote too much]")
    assert await episode.said("shell", command="true") == "[no output]"


async def test_files_are_read_written_and_edited(episode):
    assert await episode.said("write_file", path="b/c.txt", text="one\ntwo\n") == "written"
    assert await episode.said("edit_file", path="/workspace/b/c.txt", old="two", new="2") == "edited"
    assert await episode.said("read_file", path="b/c.txt") == "one\n2\n"
    for tool, arguments, said in (
        ("edit_file", {"path": "b/c.txt", "old": "zz", "new": ""}, "stands 0 times in b/c.txt, not once"),
        ("edit_file", {"path": "b/c.txt", "old": "", "new": "x"}, "stands 0 times"),
        ("read_file", {"path": "none"}, "No such file"),
        ("write_file", {"path": "/usr/x", "text": ""}, "Read-only"),
    ):
        result = await episode(tool, **arguments)
        assert (result.failed, said in result.text) == (True, True), result


async def test_a_python_session_keeps_variables_and_shows_the_last_value(episode):
    assert (
        await episode.said("python", code="import numpy as np\nx = np.arange(3)\nx + 1") == "array([1, 2, 3])"
    )
    assert await episode.said("python", code="y = x.sum()\nprint('y', y); y * 2") == "y 3\nnp.int64(6)"
    assert await episode.said("python", code="open('src/a.py').read()") == "'x = 1\\n'"
    failed = await episode("python", code="def f():\n    return 1 / 0\nf()")
    assert failed.failed
    assert failed.text.startswith(
        'Traceback (most recent call last):\n  File "<call 4>", line 3, in <module>\n    f()'
    )
    assert failed.text.endswith("ZeroDivisionError: division by zero\n[status 1]")
    assert (await episode("python", code="if")).text.endswith("SyntaxError: invalid syntax\n[status 1]")
    assert await episode.said("python", code="import threading, subprocess\nx, subprocess.call('true')") == (
        "(array([0, 1, 2]), 0)"
    )
    assert (await episode("python", code="import os; os._exit(1)")).text.startswith("[the session has ended")
    assert (await episode("python", code="x")).text.startswith(
        "[a new session has begun: earlier variables are gone]"
    )


async def test_calls_that_take_too_long_are_stopped_and_what_was_kept_stays():
    tools = build_tools([SandboxToolConfig(command_s=3.0)])
    episode = Episode(tools)
    try:
        await episode.said("python", code="x = 1")
        await episode.said("shell", command="cd /tmp")
        calls = ("shell", {"command": "echo begun; cd /; sleep 60"}), ("python", {"code": "while True: pass"})
        stopped = [one.text for one in await asyncio.gather(*(episode(name, **told) for name, told in calls))]
        assert stopped[0] == "begun\n[stopped after 3 s]"
        assert stopped[1].endswith("[stopped after 3 s]")
        assert await episode.said("python", code="x") == "1"
        assert await episode.said("shell", command="pwd") == "/tmp"
    finally:
        await episode.close()
        await tools["shell"].close()


@pytest.mark.slow
async def test_a_python_session_makes_pictures(tools):
    episode = Episode(tools)
    plot = "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.figure(); plt.show()"
    try:
        said = await episode("python", code=plot)
        assert said.text.endswith("[figure: figure-1.png]\n[figure: figure-2.png]")
        assert await episode.said("shell", command="head -c 4 figure-2.png | tail -c 3") == "PNG"
    finally:
        await episode.close()


async def test_episodes_have_sandboxes_of_their_own(tools, episode):
    other = Episode(tools)
    try:
        await other.said("shell", command="touch mine; sleep 61 &")
        assert await episode.said("shell", command="ls; pgrep sleep || echo none") == "src\nnone"
    finally:
        await other.close()
    with pytest.raises(ToolError, match="sandbox of an episode"):
        await tools["shell"].call({"command": "true"})


async def test_files_of_a_task_that_do_not_fit_are_no_fault_of_the_model(tools):
    episode = Episode(tools, sandbox_files={"/usr/x": ""})
    try:
        with pytest.raises(ToolError, match="files of task t cannot be written"):
            await episode("shell", command="true")
    finally:
        await episode.close()


def test_names_of_the_tools_are_known_before_they_are_built():
    config = ToolsConfig(type="tools", tools=[SandboxToolConfig(offers=("shell", "files"))])
    assert config.known_tools == ["shell", "read_file", "write_file", "edit_file"]
    with pytest.raises(ValueError, match="two named python"):
        ToolsConfig(type="tools", tools=[SandboxToolConfig(), {"type": "python"}])


CHECK = """
import subprocess, sys
proof = sys.stdin.readline().strip()
code = "import sys; sys.path.insert(0, '.'); from a import f; print(f(20), f(22))"
asked = [sys.executable, "-I", "-c", code]
said = subprocess.run(asked, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20).stdout
print("judged")
print(proof if said == "21 23\\n" else "wrong")
"""
SOLVED = "def f(x): return x + 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "passes"),
    [
        (f"echo '{SOLVED}' > a.py", True),
        ("true", False),
        ("echo 'import os; os._exit(0)' > a.py", False),
        ("echo 'import sys; sys.exit(0)' > a.py; echo 'print(input())' > subprocess.py", False),
        ("mkdir -p .local/lib/python3.11/site-packages; echo 'import sys; print(sys.stdin.readline()); "
         "__import__(\"os\")._exit(0)' > .local/lib/python3.11/site-packages/usercustomize.py", False),
        ("(while :; do echo 'print(input())' > /tmp/check.py; done) & sleep 0.2", False),
        ("echo 'print(input())' > /tmp/check.py; chmod 400 /tmp/check.py", False),
        ("mkfifo a.py; rm -rf /workspace/* ; yes > full", False),
    ],
)  # fmt: skip
async def test_what_a_model_left_is_judged_in_a_sandbox_in_which_nothing_of_it_runs(left, passes):
    tools = build_tools([SandboxToolConfig(check="python3 -I /tmp/check.py", disk_mb=2)])
    task = Task(task_id="t", prompt="x", metadata={"sandbox_check_files": {"/tmp/check.py": CHECK}})
    episode = EpisodeTools(task)
    try:
        if left != "true":  # which stands for no call
            await episode.call(tools["shell"], {"command": left})
        assert await episode.examined(tools.values()) == {"sandbox_check": passes}
    finally:
        await episode.close()
        await tools["shell"].close()


async def test_what_a_model_left_neither_takes_the_place_of_the_checks_files_nor_fills_the_memory():
    tools = build_tools([SandboxToolConfig(check="read line; sh t.sh && echo $line", disk_mb=1)])
    for left, said in (
        ("ln -s /dev/null t.sh", []),
        ("truncate -s 1M a b c", ["has more than 2097152 bytes"]),
    ):
        task = Task(task_id="t", prompt="x", metadata={"sandbox_check_files": {"t.sh": "exit 1"}})
        episode = EpisodeTools(task)
        try:
            await episode.call(tools["shell"], {"command": left})
            with capture_logs() as logs:
                assert await episode.examined(tools.values()) == {"sandbox_check": False}
            assert [one["reason"].partition(" ")[2] for one in logs] == said
        finally:
            await episode.close()
    await tools["shell"].close()


async def test_a_prompt_that_names_a_profile_has_its_limits_also_where_it_is_judged():
    config = SandboxToolConfig(
        disk_mb=1,
        check="read line; [ $(wc -c < full) = 3145728 ] && echo $line",
        profiles={"big": {"disk_mb": 4}},
    )
    tools = build_tools([config])
    for profile, whole in ((None, False), ("big", True)):
        episode = EpisodeTools(Task(task_id="t", prompt="x", metadata={"sandbox_profile": profile}))
        try:
            await episode.call(tools["shell"], {"command": "head -c 3M /dev/zero > full"})
            assert await episode.examined(tools.values()) == {"sandbox_check": whole}
        finally:
            await episode.close()
    await tools["shell"].close()


async def test_a_program_that_takes_more_than_its_profile_allows_is_told_what_that_is():
    tools = build_tools([SandboxToolConfig(profiles={"small": {"memory_mb": 128}})])
    hoard = f"{sys.executable} -c 'x = bytearray(80 << 20); import time; time.sleep(60)'"
    episode = EpisodeTools(Task(task_id="t", prompt="x", metadata={"sandbox_profile": "small"}))
    try:
        told = await episode.call(tools["shell"], {"command": f"{hoard} & {hoard}"})
        assert told.text == "[all programs were stopped: they took more than 128 MiB]"
    finally:
        await episode.close()
        await tools["shell"].close()


def test_a_start_refuses_profiles_that_there_are_not_or_that_no_sandbox_can_have():
    tool = {"type": "sandbox", "memory_mb": 512, "profiles": {"big": {"memory_mb": 2048}}}
    actors = ActorsConfig.model_validate({"environment": {"type": "tools", "tools": [tool]}})
    [sandbox] = actors.environment.tools
    assert sandbox.limits("big") == SandboxLimits(memory_mb=2048)
    assert sandbox.all_limits[""] is sandbox
    named = [Prompt(content="x", label="y", metadata={"sandbox_profile": n}) for n in ("big", None, "bg")]
    refuse_unknown_choices(named[:2], actors, where="p")
    with pytest.raises(ConfigError, match=r"p, prompt 3: .*'bg': did you mean 'big'\? there are big; define"):
        refuse_unknown_choices(named, actors, where="p")
    with pytest.raises(ValueError, match="memory_mb=2048 of a sandbox with profile 'big' exceeds"):
        SandboxToolConfig.model_validate({**tool, "host_budget": {"memory_mb": 1024}})
    with pytest.raises(ValueError, match=r"profiles\.big\.image: sandboxes in namespaces"):
        SandboxToolConfig(profiles={"big": {"image": "busybox"}})


def test_the_reward_of_a_sandbox_needs_a_check():
    with pytest.raises(ValueError, match="sandbox_check needs type=tools with a tool of type sandbox"):
        ToolsConfig(type="tools", tools=[SandboxToolConfig()], reward="sandbox_check")
    config = ToolsConfig(type="tools", tools=[SandboxToolConfig(check="true")], reward="sandbox_check")
    assert config.checks_sandbox
