"""A run whose episodes are led by clients from outside, through `launch gateway` on a secured bus."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from bus.server.nats_server import free_port
from learner.config.model import ScratchModel
from learner.initial.scratch_model import build_model_directory
from tests.e2e.commands import Command, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(900)]
STEPS, GROUPS, SAMPLES = 2, 2, 4
OWN = {"name": "mine", "prompt": "a task of the client's own"}


def post(url: str, body: object, key: str) -> dict:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        return json.load(answer)


def lead_episodes(url: str, token: str, own: dict | None, over: threading.Event) -> int:
    """Take tasks until it is over; return how many episodes were led to their ends."""
    done = 0
    while not over.is_set():
        try:
            taken = post(f"{url}/tasks", {"wait_s": 1, **({"task": own} if own else {})}, token)
            messages = [{"role": "user", "content": taken["prompt"]}]
            for _ in range(2):
                body = {"model": "any", "messages": messages}
                answer = post(f"{taken['openai_base_url']}/chat/completions", body, "unused")
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "again"}]
            digits = sum(c.isdigit() for message in messages for c in message["content"])
            post(taken["reward_url"], {"reward": digits / 16, "components": {"digits": digits}}, "unused")
            done += 1
        except HTTPError as refusal:
            if refusal.code not in (403, 503):  # no task now, or the process ends
                raise AssertionError(refusal.read().decode()) from refusal
        except (URLError, ConnectionError, TimeoutError):  # the process has ended
            over.wait(0.1)
    return done


@pytest.mark.nightly
def test_run_is_trained_on_episodes_that_clients_lead_with_the_runs_tasks_and_their_own(tmp_path: Path):
    sizes = ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, context=128)
    build_model_directory(tmp_path / "model", sizes, seed=0)
    (tmp_path / "mine.jsonl").write_text((json.dumps({"prompt": "digits", "label": "7"}) + "\n") * 3)
    port, gateway_port, keys = free_port("127.0.0.1"), free_port("127.0.0.1"), tmp_path / "keys"
    secured = ("--port", str(port), "--secure", str(keys), "--run", "led")
    started = [Command(tmp_path / "bus", "bus", *secured)]
    over = threading.Event()

    def start(command: str, role: str, *arguments: str) -> Command:
        creds = str(keys / f"led/{role}.creds")
        started.append(Command(tmp_path / role, command, "--creds", creds, "--run", "led", *arguments))
        return started[-1]

    try:
        wait_until(lambda: "bus_ready" in started[0].said(), "the bus", started[0])
        model = ("--model.path", str(tmp_path / "model"))
        storage = start(
            "storage", "storage", *model, "--prompts", str(tmp_path / "mine.jsonl"),
            "--learner.steps", str(STEPS), "--sampling.max-new-tokens", "8",
            "--admission.groups-per-step", str(GROUPS), "--admission.samples-per-prompt", str(SAMPLES),
            "--admission.max-staleness", "1", "--evaluation.every-versions", "0",
        )  # fmt: skip
        learner = start("learner", "learner")
        shown = start("gateway", "actor", "--show-token")
        assert shown.wait(60) == 0, shown.said()
        token = shown.said().strip()
        gateway = start("gateway", "actor", "--port", str(gateway_port))
        url = f"http://127.0.0.1:{gateway_port}"
        wait_until(lambda: "gateway_ready" in gateway.said(), "the gateway", gateway, timeout_s=240)
        with pytest.raises(HTTPError, match="401"):
            post(f"{url}/tasks", {}, "sk-wrong")
        with ThreadPoolExecutor() as clients:
            led = [clients.submit(lead_episodes, url, token, own, over) for own in (None, None, OWN, OWN)]
            try:
                assert learner.wait(400) == 0, (learner.said(), gateway.said())
                assert gateway.wait(60) == 0, gateway.said()  # it hears that the run is done
            finally:
                over.set()
            assert all(one.result() for one in led)
        run = tmp_path / "storage/runs/led"
        wait_until(lambda: (run / "summary.json").exists(), "the summary", storage)
        assert storage.stop() == 0, storage.said()
    finally:
        over.set()
        for command in started:
            command.kill()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["accounted"]) == (STEPS, True), gateway.said()
    assert summary["trajectories_trained"] == STEPS * GROUPS * SAMPLES
    assert summary["messages_set_aside_reasons"] == {}
    assert gateway.said().count(token) == 1  # what --show-token printed
