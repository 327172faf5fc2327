"""`launch dashboard` over HTTP: a real server, a run's directory and a run on a real bus."""

import asyncio
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from aiohttp import ClientResponse, ClientSession, CookieJar
from cryptography.hazmat.primitives.asymmetric import ec
from yarl import URL

from bus.codec import encode
from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.errors import ConfigError
from bus.messages import RunRecord
from bus.security.certificates import make_certificate, pem
from bus.security.credentials import load_credentials
from bus.server.nats_server import NatsServer, free_port
from bus.server.secure_directory import SecureDirectory
from bus.streams.publish import Publisher
from bus.topology import ensure
from launch.dashboard.access import Address, dashboard_token, refuse_open_dashboard
from launch.dashboard.open_runs import OpenRuns
from launch.dashboard.run_list import without_files
from launch.dashboard.server import serve_dashboard
from launch.operations.run_removal import remove_run
from launch.settings.run_config import RunConfig
from storage.disk.atomic_files import try_lock
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import append_records, metrics_record
from tests.launch.dashboard.run_on_disk import make_run
from tests.launch.dashboard.served_page import TOKEN, no_bus, served
from tests.launch.messages import actor, learner, metrics, storage
from tests.launch.speaking_processes import answer
from tests.storage.serving import running


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> dict:
        return json.loads(self.text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with one run of five steps."""
    run = RunDirectory(tmp_path / "runs", "demo")
    append_records(run.metrics, [metrics_record(metrics(n, reward=n / 8)) for n in range(1, 6)])
    return tmp_path / "runs"


async def get(client: ClientSession, path: str, **headers: str) -> Answer:
    """Ask, and read the whole answer."""
    async with client.get(path, headers=headers, allow_redirects=False) as answer:
        return Answer(answer.status, answer.headers, await answer.text())


async def event(answer: ClientResponse, wanted: str) -> dict:
    """The value of the next event of that name."""
    name = ""
    async for line in answer.content:
        if line.startswith(b"event: "):
            name = line[7:].decode().strip()
        elif line.startswith(b"data: ") and name == wanted and line != b"data: null\n":
            return json.loads(line[6:])
    raise AssertionError(f"the answer ended before an event {wanted!r}")


async def test_runs_and_curves_come_from_the_directory(root: Path):
    async with served(OpenRuns(root, no_bus)) as url, ClientSession(url) as client:
        listed = (await get(client, "/api/runs")).json
        assert [run["run"] for run in listed["runs"]] == ["demo"]
        found = (await get(client, "/api/runs/demo/curves")).json
        assert found["steps"]["columns"]["reward/mean"]["mean"] == [n / 8 for n in range(1, 6)]
        assert "train/policy_version" not in found["steps"]["columns"]
        every = (await get(client, "/api/runs/demo/curves?all=1")).json
        assert every["steps"]["columns"]["train/policy_version"]["mean"] == [2, 3, 4, 5, 6]
        titles = [chart["title"] for chart in ((await get(client, "/api/runs/demo")).json)["charts"]]
        assert titles[0] == "Reward"
        for path in ("/api/runs/other", "/api/runs/..%2Fruns/curves", "/static/../server.py"):
            assert (await get(client, path)).status == 404
        for method in ("post", "put", "delete"):
            async with client.request(method, "/api/runs/demo") as answer:
                assert answer.status == 405
    assert [*root.rglob("*")] == [root / "demo", root / "demo/metrics.jsonl"]  # noqa: ASYNC240 - small


async def test_a_reader_with_the_token_notes_something_and_removes_a_run_that_is_over(root: Path):
    removing = RunDirectory(root, "demo")
    removing.config.write_text(RunConfig(run="demo").model_dump_json())

    async def remove(name: str) -> None:
        where = RunConfig(run=name, directory=root)
        await remove_run(where, False, True, asyncio.Event())

    runs = OpenRuns(root, no_bus, remove=remove)
    allowed = {"Authorization": f"Bearer {TOKEN}"}
    async with served(runs, token=TOKEN) as url, ClientSession(url, headers=allowed) as client:
        for sent, status in (
            ({"json": {"text": "the good one"}}, 200),
            ({"data": '{"text": "another page"}'}, 415),
            ({"json": {"text": "x" * 2001}}, 404),
            ({"json": {"text": "x" * 20_000}}, 413),
        ):
            async with client.post("/api/runs/demo/note", **sent) as answer:
                assert answer.status == status
        facts = (await get(client, "/api/runs/demo")).json
        assert (facts["note"], facts["may_change"]) == ("the good one", True)
        with removing.path.joinpath("lock").open("a") as lock:  # as of a launch that goes on
            assert try_lock(lock)
            for named, said in (("dmeo", "does not confirm"), ("demo", "stop the run first")):
                async with client.post("/api/runs/demo/remove", json={"run": named}) as answer:
                    assert answer.status == 404
                    assert said in (await answer.json())["error"]
        async with client.post("/api/runs/demo/remove", json={"run": "demo"}) as answer:
            assert answer.status == 200
        assert (await get(client, "/api/runs")).json["runs"] == []
    assert [*root.iterdir()] == []  # noqa: ASYNC240 - small


async def test_nobody_changes_a_run_without_a_token(root: Path):
    async with served(OpenRuns(root, no_bus)) as url, ClientSession(url) as client:
        for path, change in (("note", {"text": "mine"}), ("remove", {"run": "demo"})):
            async with client.post(f"/api/runs/demo/{path}", json=change) as answer:
                assert answer.status == 403
        facts = (await get(client, "/api/runs/demo")).json
    assert (facts["note"], facts["may_change"]) == ("", False)


def test_a_run_without_files_here_is_told_with_those_that_have_some(root: Path):
    assert without_files(root, "demo") is None
    note = without_files(root, "dmeo")
    assert note is not None
    assert "has no files of run 'dmeo'" in note
    assert note.endswith("has demo")
    with pytest.raises(ConfigError, match="'de/mo' cannot be"):
        without_files(root, "de/mo")


async def test_new_steps_are_sent_as_they_are_recorded(root: Path):
    async with served(OpenRuns(root, no_bus)) as url, ClientSession(url) as client:
        async with client.get("/api/runs/demo/live") as answer:
            assert (await event(answer, "curves"))["steps"]["step"] == [1, 2, 3, 4, 5]
            append_records(root / "demo/metrics.jsonl", [metrics_record(metrics(6))])
            assert (await event(answer, "curves"))["steps"]["step"] == [5, 6]
        async with client.get("/api/runs/demo/live") as answer:
            status = await event(answer, "status")
    assert (status["live"], status["why"]) == (False, "nobody knows the bus of demo")


@pytest.mark.nats
async def test_a_run_on_the_bus_alone_shows_its_curves_and_what_waits_for_what(
    bus: Bus, server: NatsServer, tmp_path: Path
):
    config = RunConfig(run="test", admission={"groups_per_step": 20})
    await bus.put("run", RunRecord(name="test", config_json=config.model_dump_json()))
    publisher = Publisher(bus)
    for step in (1, 2):
        await publisher.publish(
            bus.subject("events", "metrics"), encode(metrics(step)), message_id=f"m{step}"
        )
    waiting = learner(doing="waiting for the batch", wait="batch", reason="8 groups are complete")
    where = RunConfig(run="test", bus=BusConfig(url=server.url))

    async def speak(stop: asyncio.Event) -> None:
        while not stop.is_set():
            for status in (storage(), actor(), waiting):
                await bus.notify(bus.subject("status", status.role), status)
            await asyncio.sleep(0.1)

    runs = OpenRuns(tmp_path / "none", lambda run: where, "test")
    async with running(speak), served(runs) as url, ClientSession(url) as client:
        async with client.get("/api/runs/test/live") as answer:
            curves = await event(answer, "curves")
            assert curves["steps"]["step"] == [1, 2]
            async with client.get("/api/runs") as listed, client.get("/api/runs/test") as told:
                for facts in ((await listed.json())["runs"][0], await told.json()):
                    assert (facts["here"], facts["state"]) == (False, None), "no file says it"
            await publisher.publish(bus.subject("events", "metrics"), encode(metrics(3)), message_id="m3")
            assert (await event(answer, "curves"))["steps"]["step"] == [2, 3]
        async with client.get("/api/runs/test/live") as answer, asyncio.timeout(60):
            status = await event(answer, "status")
            # Where the host is busy, some part is heard later than the first status.
            while not any(
                text.startswith("the learner waits for the groups") for text in status["report"]["waits"]
            ):
                status = await event(answer, "status")
    assert status["live"]
    assert status["report"]["stage"] == "rl"
    places = {place["name"]: place for place in status["flow"]}
    assert list(places) == ["Prompts", "Actors and engines", "Replay store", "Learner", "Weights"]
    assert places["Actors and engines"]["figures"][1] == ["30", "requests run in engines"]
    assert places["Replay store"]["queue"] == {
        "label": "complete groups, of what a step needs", "used": 12, "bound": 20,
    }  # fmt: skip
    assert (places["Learner"]["condition"], places["Learner"]["doing"]) == ("waits", "waiting for the batch")
    assert not (tmp_path / "none").exists()


@pytest.mark.nats
async def test_the_credentials_of_a_watcher_are_enough(tmp_path: Path):
    secure = SecureDirectory(tmp_path / "keys")
    server = NatsServer(tmp_path / "nats", secure=secure)
    secure.make(["test"], server.url)

    def settings(role: str) -> BusConfig:
        path = secure.path / "test" / f"{role}.creds"
        return BusConfig(url=load_credentials(path).url, creds=path)

    async with (
        server,
        Bus.connect(settings("storage"), "test", name="storage") as keeper,
        Bus.connect(settings("learner"), "test", name="learner") as teacher,
    ):
        await keeper.create_keys()
        await ensure(keeper.js, keeper.topology, shards=2)
        await answer(keeper)
        subject = teacher.subject("events", "metrics")
        await Publisher(teacher).publish(subject, encode(metrics(1)), message_id="m1")

        async def speak(stop: asyncio.Event) -> None:
            while not stop.is_set():
                await keeper.notify(keeper.subject("status", "storage"), storage())
                await teacher.notify(teacher.subject("status", "learner"), learner())
                await asyncio.sleep(0.1)

        where = RunConfig(run="test", bus=settings("watcher"))
        token = dashboard_token(where.bus.creds)
        shown = {"Authorization": f"Bearer {token}"}
        runs = OpenRuns(tmp_path / "none", lambda run: where, "test")
        async with (
            running(speak),
            served(runs, token=token) as url,
            ClientSession(url, headers=shown) as client,
        ):
            async with client.get("/api/runs/test/live") as told:
                assert (await event(told, "curves"))["steps"]["step"] == [1]
            async with client.get("/api/runs/test/live") as told:
                status = await event(told, "status")
    assert status["live"], status
    assert status["report"]["problems"] == [
        "no actor was heard within 1.3 s, and 64 groups are to be rolled out: "
        "if none runs, start one with `launch actors --run test`"
    ]


async def test_readers_show_the_token(root: Path):
    jar = CookieJar(unsafe=True)
    async with (
        served(OpenRuns(root, no_bus), token=TOKEN) as url,
        ClientSession(url, cookie_jar=jar) as client,
    ):
        assert (await get(client, "/api/runs")).status == 401
        assert (await get(client, "/")).headers["location"] == "/login"
        assert (await get(client, "/static/page.js")).status == 303
        assert (await get(client, "/api/runs", Authorization=f"Bearer {TOKEN}")).status == 200
        assert (await get(client, "/api/runs", Authorization=f"Bearer {TOKEN}x")).status == 401
        async with client.post("/login", data={"token": "guess"}) as refused:
            assert (refused.status, "That is not the token." in await refused.text()) == (403, True)
        assert (await get(client, "/api/runs")).status == 401
        async with client.post("/login", data={"token": TOKEN}, allow_redirects=False) as entered:
            assert entered.headers["location"] == "/"
            cookie = entered.headers["set-cookie"]
        assert cookie.startswith(f"sluice-dashboard-{URL(url).port}=")  # other ports share its host's cookies
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in cookie
        assert (await get(client, "/api/runs")).status == 200


async def test_a_page_of_another_name_that_leads_here_reads_nothing(root: Path):
    async with served(OpenRuns(root, no_bus)) as url, ClientSession(url) as client:
        for host, status in (("evil.example:80", 421), ("localhost:1", 200), ("127.0.0.1", 200)):
            assert (await get(client, "/api/runs", Host=host)).status == status, host
        page = await get(client, "/")
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"


async def test_with_a_token_a_proxy_may_lead_here_from_any_name(root: Path):
    async with served(OpenRuns(root, no_bus), token=TOKEN) as url, ClientSession(url) as client:
        shown = {"Authorization": f"Bearer {TOKEN}", "Host": "runs.example"}
        assert (await get(client, "/api/runs", **shown)).status == 200
        assert (await get(client, "/api/runs", Host="runs.example")).status == 401


async def test_a_directory_that_cannot_be_read_is_no_run(root: Path, monkeypatch: pytest.MonkeyPatch):
    (root / "theirs").mkdir()
    look = Path.is_file

    def refused(path: Path) -> bool:  # as for everybody but root
        if path.parent.name == "theirs":
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(Path, "is_file", refused)
    async with served(OpenRuns(root, no_bus)) as url, ClientSession(url) as client:
        assert [run["run"] for run in (await get(client, "/api/runs")).json["runs"]] == ["demo"]
        assert (await get(client, "/api/runs/demo")).status == 200


async def test_metrics_that_cannot_be_read_hide_no_other_run(root: Path):
    (root / "odd/metrics.jsonl").mkdir(parents=True)
    (root / "odd/config.json").write_text("{}")
    async with served(OpenRuns(root, no_bus)) as url, ClientSession(url) as client:
        facts = {run["run"]: run for run in (await get(client, "/api/runs")).json["runs"]}
        assert (facts["odd"]["last_time_s"], facts["demo"]["last_time_s"] is None) == (None, False)
        assert "Is a directory" in (await get(client, "/api/runs/odd/curves")).json["problem"]
        refused = await get(client, "/api/runs/odd/timeline")
    assert (refused.status, "metrics.jsonl" in refused.json["error"]) == (503, True)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (
            "trajectories?step=99999999999999999999",
            "step=99999999999999999999: it is a whole number from 0 to",
        ),
        ("trajectories?version=-1", "version=-1: it is a whole number"),
        ("trajectories?below=x", "below=x: it is a whole number"),
        ("trajectories?least=much", "least=much: it is a number"),
        ("trajectories?ratio_least=nan", "least_ratio=nan: it is a number, which others are compared with"),
        ("trajectories?end=stop", "no trajectory ends as 'stop': it is one of completed"),
        ("timeline?seconds=²", "seconds=²: it is a whole number from 1 to 3600"),
        ("timeline?seconds=" + 5000 * "9", "it is a whole number from 1 to 3600"),
        ("timeline?seconds=0", "seconds=0: it is a whole number from 1 to 3600"),
    ],
)
async def test_a_number_out_of_bounds_is_refused_in_words(root: Path, query: str, words: str):
    async with served(OpenRuns(root, no_bus)) as url, ClientSession(url) as client:
        answer = await get(client, f"/api/runs/demo/{query}")
    assert answer.status == 404
    assert words in answer.json["error"]


async def test_a_certificate_that_cannot_be_used_is_told_before_the_address_is(root: Path, tmp_path: Path):
    wrong, missing = tmp_path / "wrong.pem", tmp_path / "missing.pem"
    wrong.write_text("no certificate")
    for certificate, key, words in (
        (wrong, None, "--certificate and --certificate-key are of no use alone"),
        (None, wrong, "--certificate and --certificate-key are of no use alone"),
        (wrong, wrong, "--certificate .*wrong.pem with --certificate-key .*wrong.pem: "),
        (missing, wrong, "--certificate .*missing.pem with .*: .*No such file"),
    ):
        told: list[str] = []
        address = Address(port=0, certificate=certificate, certificate_key=key)
        with pytest.raises(ConfigError, match=words):
            await serve_dashboard(OpenRuns(root, no_bus), address, asyncio.Event(), ready=told.append)
        assert told == []


async def test_the_page_is_served_by_tls(root: Path, tmp_path: Path):
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = make_certificate("localhost", key)
    (tmp_path / "cert.pem").write_bytes(pem(certificate))
    (tmp_path / "key.pem").write_bytes(pem(key))
    address = Address("127.0.0.1", 0, tmp_path / "cert.pem", tmp_path / "key.pem")
    trusting = ssl.create_default_context(cadata=pem(certificate).decode())
    async with served(OpenRuns(root, no_bus), address) as url, ClientSession() as client:
        assert url.startswith("https://127.0.0.1:")
        async with client.get(f"{url}/api/runs", ssl=trusting, server_hostname="localhost") as answer:
            assert answer.status == 200


def test_beyond_loopback_a_token_and_tls_are_asked_for(monkeypatch):
    everywhere = Address(host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"--host 0.0.0.0 would show every run .* SLUICE_DASHBOARD_TOKEN"):
        refuse_open_dashboard(everywhere, None, insecure=True)
    with pytest.raises(ConfigError, match="without TLS"):
        refuse_open_dashboard(everywhere, TOKEN, insecure=False)
    refuse_open_dashboard(everywhere, TOKEN, insecure=True)
    refuse_open_dashboard(Address(host="0.0.0.0", certificate=Path("cert.pem")), TOKEN, insecure=False)
    refuse_open_dashboard(Address(host="::1"), None, insecure=False)
    monkeypatch.setenv("SLUICE_DASHBOARD_TOKEN", "short")
    with pytest.raises(ConfigError, match="has 5 characters"):
        dashboard_token(None)
    monkeypatch.setenv("SLUICE_DASHBOARD_TOKEN", TOKEN)
    assert dashboard_token(None) == TOKEN
    monkeypatch.setenv("SLUICE_DASHBOARD_TOKEN", f"{TOKEN}\n")
    assert dashboard_token(None) == TOKEN
    for unset in ("", "\n"):
        monkeypatch.setenv("SLUICE_DASHBOARD_TOKEN", unset)
        assert dashboard_token(None) is None


async def test_a_port_that_is_taken_is_named(root: Path):
    taken = free_port("127.0.0.1")
    blocking = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", taken)
    async with blocking:
        with pytest.raises(
            ConfigError, match=f"cannot listen at 127.0.0.1:{taken} .*: choose another --port"
        ):
            await serve_dashboard(OpenRuns(root, no_bus), Address(port=taken), asyncio.Event(), ready=print)


async def test_labels_are_shown_to_who_may_see_them(tmp_path: Path):
    run = make_run(tmp_path, "labelled", steps=3)
    open_bus = json.loads(run.config.read_text())
    secured = open_bus | {"bus": open_bus["bus"] | {"creds": "watcher.creds"}}

    async def labels(token: str | None) -> list[str | None]:
        shown = {"Authorization": f"Bearer {token}"}
        async with served(OpenRuns(tmp_path, no_bus), token=token) as url, ClientSession(url) as client:
            places = ("trajectories/g00000007.1", "groups/7")
            return [
                (await get(client, f"/api/runs/labelled/{place}", **shown)).json["label"] for place in places
            ]

    assert await labels(None) == ["label 2", "label 2"]
    run.config.write_text(json.dumps(secured))
    assert await labels(None) == [None, None]
    assert await labels(TOKEN) == ["label 2", "label 2"]


async def test_held_out_answers_that_are_not_there_are_told_as_such(tmp_path: Path):
    make_run(tmp_path, "measured", steps=3)
    async with served(OpenRuns(tmp_path, no_bus)) as url, ClientSession(url) as client:
        for asked, said in (
            ("groups/5?held_out=on", "the group of lease 5 is not complete"),
            ("groups/99999999999999999999?held_out=on", "it is a whole number from 0 to"),
            ("trajectories/h00000005.0", "h00000005.0 is not among the complete groups"),
            ("trajectories?data_set=aime", "is of answers to held-out prompts alone"),
        ):
            answer = await get(client, f"/api/runs/measured/{asked}")
            assert said in answer.text
            assert answer.status < 500
