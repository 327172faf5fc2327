"""Programs of agents in sandboxes: they reach the gateway alone, leave nothing, and do not pay themselves."""

import asyncio
import io
import socket
import sys
import tarfile
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from actors.engines.base import Sampling
from actors.environments.agent import AgentEnvironment
from actors.environments.agent_sandbox import _unpack
from actors.environments.build import build_environment
from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.settings.agents import AgentConfig
from bus.errors import ConfigError
from tests.actors.environments.test_agent import HEAD
from tests.actors.environments.test_payment import VERIFIER
from tests.actors.episode_sandboxes.daemons import IMAGE, ask_for_few_processes, daemon_of, image_of_python
from tests.actors.gateway.served import TOKENIZER, script
from tests.actors.scripted_engine import ScriptedEngine

LABEL = "LABEL-90210"
TASK = Task(
    task_id="g00000000.0",
    prompt="say fine",
    label=LABEL,
    metadata={"sandbox_files": {"note.txt": "noted"}, "sandbox_check_files": {"hidden": "true"}},
)
PROGRAM = """
import socket, subprocess
assert task == {"task_id": "g00000000.0", "prompt": "say fine", "metadata": {}} and not given
assert not os.path.exists("hidden") and open("note.txt").read() == "noted" and os.getcwd() == "/workspace"
seen = str([dict(os.environ), sys.argv]) + open("/proc/1/cmdline").read()
assert "LABEL" not in seen and "reward" not in seen.lower()
for address in (("127.0.0.1", int(sys.argv[1])), ("192.0.2.1", 80)):  # a bus of the host, and the world
    try:
        socket.create_connection(address, timeout=5)
    except OSError:
        continue
    sys.exit("reached " + str(address))
try:
    post(os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/reward", 1.0)
except urllib.error.HTTPError as error:
    assert error.code == 403, error
else:
    sys.exit("paid itself")
open("left.txt", "w").write(ask("hi"))
if sys.argv[2] == "hangs":
    subprocess.run(["sleep", "7813"])
subprocess.Popen(["sleep", sys.argv[3]], start_new_session=True)
"""
JUDGE = VERIFIER.replace(
    "reward = ",
    """
left = given["directory"] + "/left.txt"
assert not os.path.exists(left) or open(left).read() == "fine"
given["answer"] = given["label"] if os.path.exists(left) else ""
reward = """,
)


@pytest.fixture(
    params=["namespaces", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("docker", "podman"))],
    scope="module",
)
def backend(request):
    """Settings of a back end, and its Python."""
    if request.param == "namespaces":
        yield {"type": "namespaces"}, "{python}"
        return
    with pytest.MonkeyPatch.context() as patch, daemon_of(request.param, image_of_python()) as daemon:
        ask_for_few_processes(patch.setattr)
        yield {"type": "docker", "image": IMAGE, "socket": str(daemon)}, "python3"


@pytest.fixture
def settings(backend, tmp_path, monkeypatch):
    """Settings of an environment whose program lies where the actor works, and a Python of its sandboxes."""
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(HEAD + PROGRAM)
    Path("judge.py").write_text(JUDGE)
    judge = f"{sys.executable} -S judge.py"
    sandbox, readable = {"backend": backend[0], "warm": 1}, {"readable": (tmp_path,)}
    return {"sandbox": sandbox, "reward": "posted", "verifier": judge, "isolation": readable}, backend[1]


async def test_a_program_in_a_sandbox_reaches_the_gateway_alone_and_leaves_nothing(settings, tmp_path):
    given, python = settings
    policy = Policy(ScriptedEngine(script(lambda _: "fine")), TOKENIZER, Sampling(max_new_tokens=64))
    with socket.create_server(("127.0.0.1", 0)) as bus:
        command = f"{python} -S agent.py {bus.getsockname()[1]}"
        async with environment_of(command=f"{command} ends 7812", **given) as environment:
            episodes = await asyncio.gather(*(environment.run(TASK, policy) for _ in range(3)))
        for episode in episodes:
            [trajectory] = episode.trajectories
            assert (trajectory.reward, trajectory.end) == (1.0, "completed")
            assert trajectory.loss_mask.sum() == 5
        checked = {**given, "reward": "sandbox_check", "verifier": None}
        for check, reward in (("read a; grep -q fine left.txt; . ./hidden; echo $a", 1.0), ("exit 0", 0.0)):
            checked["sandbox"] = {**given["sandbox"], "check": check}
            async with environment_of(command=f"{command} ends 7812", **checked) as environment:
                [trajectory] = (await environment.run(TASK, policy)).trajectories
            assert trajectory.reward == reward
        whole = command.replace("agent.py", f"{tmp_path}/agent.py")
        hanging = {**given, "command": f"{whole} hangs -", "program_timeout_s": 1.5}
        async with environment_of(**hanging) as environment:
            with pytest.raises(EpisodeError, match=r"it ran for 1\.5 s"):
                await environment.run(TASK, policy)
    left = [one.info["cmdline"] for one in psutil.process_iter(["cmdline"])]
    assert not [words for words in left if words in (["sleep", "7812"], ["sleep", "7813"])]


@asynccontextmanager
async def environment_of(**settings):
    environment = AgentEnvironment.from_config(AgentConfig(**settings))
    try:
        yield environment
    finally:
        await environment.close()


def test_what_leads_out_of_a_workspace_stays_behind(tmp_path):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, target in (("../out", ""), ("link", "/etc/passwd"), ("kept", "")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = (tarfile.SYMTYPE if target else tarfile.REGTYPE), target
            archive.addfile(member)
    (tmp_path / "left").mkdir()
    _unpack(packed.getvalue(), tmp_path / "left")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"left", "left/kept"}


def test_what_leads_out_by_a_path_that_is_too_long_to_follow_stays_behind_too(tmp_path):
    packed, steps, below, left = io.BytesIO(), "abcdefghijklmnop", "", tmp_path / "left"
    with tarfile.open(fileobj=packed, mode="w") as archive:

        def add(name, kind, target="", data=b""):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, target, len(data)
            archive.addfile(member, io.BytesIO(data))

        for step in steps:  # short names for a path of more bytes than Linux takes (CVE-2025-4517)
            add(below + "d" * 247, tarfile.DIRTYPE)
            add(below + step, tarfile.SYMTYPE, "d" * 247)
            below += "d" * 247 + "/"
        far = "/".join(steps) + "/" + "l" * 254
        add(far, tarfile.SYMTYPE, "../" * len(steps))
        add("up", tarfile.SYMTYPE, f"{far}/..")
        add("up/out", tarfile.REGTYPE, data=b"written")
        add("read", tarfile.LNKTYPE, "up/label")
        add("kept", tarfile.REGTYPE)
    (tmp_path / "label").write_text(LABEL)
    left.mkdir()
    _unpack(packed.getvalue(), left)
    assert {path.name for path in tmp_path.iterdir()} == {"left", "label"}
    assert (left / "kept").exists()
    assert not (left / "read").exists()


def test_settings_that_cannot_hold_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not pay itself"):
        AgentConfig(command="true", sandbox={}, program_owns_reward=True)
    image = {"type": "docker", "image": IMAGE, "socket": str(tmp_path / "none")}
    with pytest.raises(ValueError, match=r"an image has no \{python\}"):
        AgentConfig(command="{python} a.py", sandbox={"backend": image})
    with pytest.raises(ConfigError, match="no daemon listens there"):  # and the program may be the image's
        build_environment(AgentConfig(command="no-such-program", reward="exact", sandbox={"backend": image}))
