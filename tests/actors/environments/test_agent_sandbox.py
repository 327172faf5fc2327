"""Programs of agents in sandboxes: they reach the gateway alone, leave nothing, and do not pay themselves."""

import asyncio
import io
import socket
import sys
import tarfile
import threading
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from actors.engines.base import Sampling
from actors.environments.agent import AgentEnvironment
from actors.environments.agent_sandbox import _unpack
from actors.environments.build import build_environment
from actors.episode_sandboxes.server import SandboxServer
from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.settings.agents import AgentConfig
from actors.settings.episode_sandboxes import SandboxServerConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError
from tests.actors.environments.agent_programs import HEAD
from tests.actors.environments.schemers import VERIFIER
from tests.actors.episode_sandboxes.cluster import cluster
from tests.actors.episode_sandboxes.daemons import IMAGE, ask_for_few_processes, daemon_of, image_of_python
from tests.actors.gateway.served import TOKENIZER, script

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


@asynccontextmanager
async def sandbox_server():
    """The address of a server of sandboxes."""
    server, stop = SandboxServer(SandboxServerConfig(port=0)), asyncio.Event()
    serving = asyncio.create_task(server.serve(stop))
    yield f"http://127.0.0.1:{await server.port}"
    stop.set()
    await serving


@contextmanager
def served_apart(server):
    """What a server yields that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        serving = server()
        yield asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result(60)
        asyncio.run_coroutine_threadsafe(serving.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


@pytest.fixture(
    params=[
        "namespaces",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("http", "kubernetes")),
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("docker", "podman")),
    ],
    scope="module",
)  # fmt: skip
def backend(request, tmp_path_factory):
    """Settings of a back end, and its Python."""
    if request.param == "http":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLUICE_SANDBOX_TOKEN", "secret")
            with served_apart(sandbox_server) as url:
                yield {"type": "http", "url": url}, "python3"
        return
    if request.param == "kubernetes":
        token = tmp_path_factory.mktemp("cluster") / "token"
        token.write_text("secret")
        with served_apart(cluster) as (_, url):
            pods = {"namespace": "train", "token_file": str(token), "certificate": "host"}
            yield {"type": "kubernetes", "image": IMAGE, "api": url, **pods}, "python3"
        return
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
    given = {"reward": "posted", "verifier": judge, "isolation": {"readable": (tmp_path,)}}
    if backend[0]["type"] in ("http", "kubernetes"):
        given["gateway"] = {"advertise": "http://127.0.0.1:{port}"}
    return {"sandbox": {"backend": backend[0], "warm": 1}, **given}, backend[1]


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
    far = {"type": "http", "url": "http://192.0.2.1:8900"}
    with pytest.raises(ValueError, match=r"does not reach this host's gateway\.host=127\.0\.0\.1: set"):
        AgentConfig(command="true", sandbox={"backend": far})
    with pytest.raises(ConfigError, match="no daemon listens there"):  # and the program may be the image's
        build_environment(AgentConfig(command="no-such-program", reward="exact", sandbox={"backend": image}))
