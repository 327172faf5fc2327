"""Faults planted in a real process of a shard or a learner are found, each by the names of its victims."""

import asyncio
import itertools
import os
from collections import defaultdict
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from transformers import Qwen3Config

from actors.environments.single_turn import SingleTurn
from actors.rewards.scoring.scorers import Scorer
from benchmarks.scripted_engine import ScriptedEngine
from bus.codec import encode
from bus.connection import Bus
from bus.messages import PolicyManifest, RunRecord
from bus.process.child_process import module_command
from bus.server.nats_server import NatsServer
from bus.streams.blob_store import put_blob
from bus.streams.publish import Publisher
from launch.verify.comparison import Verdicts
from launch.verify.verify import verified
from learner.initial.scratch_model import character_tokenizer
from soak import soak
from soak.bus_faults import kill_server
from soak.faults import Fault
from soak.run_faults import kill_after_ack
from soak.soak import SoakPlan, run_soak
from soak.trajectory_account import exit_status
from storage.account.records import ACTORS
from storage.disk.run_directory import RunDirectory
from storage.model_files.packed_files import bundle
from tests.actors.workers import TOKENIZER, make_worker
from tests.storage.serving import BLOB, running, until

pytestmark = pytest.mark.nats
PLANTED = Path(__file__).parent / "planted"
GROUPS, SAMPLES = 30, 4
KILL_SERVER = Fault(1, kill_server)
"""A server that is killed and starts again loses nothing that it acknowledged."""
SETTINGS = (
    "--run", "test", "--data.task", "sort", "--replay.shards", "2",
    "--admission.groups-per-step", str(GROUPS), "--admission.samples-per-prompt", str(SAMPLES),
    "--admission.max-staleness", "0", "--sampling.max-new-tokens", "8", "--warmup.steps", "0",
    "--evaluation.every-versions", "0",
)  # fmt: skip


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory(tmp_path, "test")


@asynccontextmanager
async def storage_process(server: NatsServer, bus: Bus, run: RunDirectory, *faults: str):
    """A process of `launch storage` with these faults in it, which is ready; it is killed at the end."""
    settings = ["--bus.url", server.url, "--directory", str(run.path.parent), *SETTINGS]
    planted = {
        "PYTHONPATH": str(PLANTED), "SLUICE_PLANT": ",".join(faults),
        "SLUICE_PLANTED": str(run.path.parent / "struck"),
        "SLUICE_PLANTED_LATE_S": "3600",  # the process is killed before, however slow this machine is
    }  # fmt: skip
    with (run.path.parent / "storage.log").open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *module_command("launch", "storage", *settings),
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, **planted},
        )  # fmt: skip

    async def announced() -> bool:
        return await bus.get("run", RunRecord) is not None

    try:
        await until(announced, seconds=200)
        await publish_policy(bus, run.path.parent / "model")
        yield
    finally:
        process.kill()
        await process.wait()


async def publish_policy(bus: Bus, directory: Path) -> None:
    """Publish a version whose tokenizer and vocabulary storage can read, and whose weights nobody fetches."""
    character_tokenizer().save_pretrained(directory)
    Qwen3Config(max_position_embeddings=512).save_pretrained(directory)
    model = await put_blob(bus, Publisher(bus), encode(bundle(directory)), "model")
    manifest = PolicyManifest(policy_version=0, incarnation="a", snapshot=BLOB, model=model, stage="rl")
    await bus.put("policy", manifest)


def struck(run: RunDirectory) -> dict[str, set[str]]:
    """Return the trajectories that were struck, by fault."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    path = run.path.parent / "struck"
    for line in path.read_text().splitlines() if path.exists() else ():
        fault, name = line.split()
        found[fault].add(name)
    return found


@asynccontextmanager
async def rolling_out(bus: Bus, run: RunDirectory):
    """A worker over a scripted engine, which answers otherwise each time and keeps its account."""
    answers = itertools.count(10)
    engine = ScriptedEngine(lambda tokens: [*digits(next(answers)), TOKENIZER.eos_token_id])
    await engine.start()
    environment = SingleTurn(Scorer("one", timeout_s=60, reward=lambda answer: 1.0 / float(answer.text)))
    parts = {"share_after_s": None, "account": run.path / ACTORS}
    worker = make_worker(bus, engine, environment, max_new_tokens=8, **parts)
    async with running(lambda stop: worker.run(stop, groups_at_once=4)):
        yield worker
    await engine.close()


def digits(number: int) -> list[int]:
    return TOKENIZER(str(number), add_special_tokens=False)["input_ids"]


async def settled(bus: Bus, run: RunDirectory) -> Verdicts:
    """Return the account once no message waits for a shard."""

    async def all_taken() -> bool:
        found = await bus.js.stream_info(bus.topology.stream("TRAJECTORIES"))
        return found.state.messages == 0

    await until(all_taken)
    return await verified(run, bus=bus)


@pytest.mark.nightly
@pytest.mark.slow
async def test_what_a_shard_drops_or_changes_is_found_by_name(server, bus, run):
    faults = ("dropped", "inverted", "altered", "swapped")
    async with storage_process(server, bus, run, *faults), rolling_out(bus, run) as worker:
        await until(lambda: worker.counts["trajectories"] >= GROUPS * SAMPLES, seconds=60)
        found = await settled(bus, run)
    names = struck(run)
    assert {fault for fault in names if len(names[fault]) > 1} == set(faults)
    assert set(found.found["lost"]) == names["dropped"]
    assert set(found.found["altered"]) == names["inverted"] | names["altered"] | names["swapped"]
    rewards = {name for name, why in found.found["altered"].items() if "its reward was sent as" in why}
    assert rewards == names["inverted"]
    assert (found.found["twice"], found.found["unlisted"]) == ({}, {})


@pytest.mark.slow
async def test_what_was_acked_before_its_write_is_found_when_the_shard_was_killed_between(server, bus, run):
    async with storage_process(server, bus, run, "early_ack"), rolling_out(bus, run) as worker:
        await until(lambda: worker.counts["trajectories"] >= 5 * SAMPLES, seconds=60)
        await until(lambda: len(struck(run)["early_ack"]) >= SAMPLES)
    found = await verified(run, bus=bus)
    # What is struck is acked a moment later: where the kill comes between, the bus has the message still.
    on_bus = set(found.found["in_flight"])
    assert set(found.found["lost"]) == struck(run)["early_ack"] - on_bus != set()
    assert found.totals["acknowledged"] == len(found.found["lost"]) + len(on_bus)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("fault", "part", "verdict"),
    [
        ("early_ack", "storage", "lost"),
        ("dropped", "storage", "lost"),
        ("inverted", "storage", "altered"),
        ("altered", "storage", "altered"),
        ("swapped", "storage", "altered"),
        ("trained_twice", "learner", "twice"),
    ],
)
async def test_a_soak_ends_with_status_1_and_names_what_a_planted_fault_struck(
    tmp_path, monkeypatch, fault, part, verdict
):
    victims = tmp_path / "struck"
    planted = {"PYTHONPATH": str(PLANTED), "SLUICE_PLANT": fault, "SLUICE_PLANTED": str(victims)}
    flags = [(f"--supervision.environment.{part}.{name}", value) for name, value in planted.items()]
    monkeypatch.setattr(soak, "SETTINGS", (*soak.SETTINGS, *itertools.chain.from_iterable(flags)))
    monkeypatch.setattr(soak, "bus_faults", lambda target: (KILL_SERVER,))
    if fault == "early_ack":  # it harms only when storage dies between an ack and its write
        monkeypatch.setattr(soak, "RUN_FAULTS", (Fault(1, kill_after_ack),))
    result = await run_soak(SoakPlan(minutes=1.0, seed=3, outages_s=(2.0, 5.0)), tmp_path, asyncio.Event())
    assert exit_status(result) == 1, result
    named = result["verify"]["named"][verdict]
    assert named.keys() <= {line.split()[1] for line in victims.read_text().splitlines()}
