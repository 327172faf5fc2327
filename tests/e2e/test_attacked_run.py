"""A run goes on while its records are forged and erased, and while keys of its roles are exchanged."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.codec import encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.messages import BlobRef, PolicyManifest, RoleHolder, RunIdentity, RunRecord
from bus.security.credentials import load_credentials
from bus.server.nats_server import free_port
from bus.server.secure_directory import SecureDirectory
from tests.e2e.commands import SMALL, Command, wait_until, with_steps

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(600)]
RUN = "attacked"
SETTINGS = (*with_steps(SMALL, 1000), "--learner.entropy-coef", "0.1")
RECORDS = ("run", "identity", "heldout", "policy", "role.learner", "role.dispatcher", "role.shard-0")
SUBJECTS = ("notice.policy", "rpc.resumed", "rpc.committed", "rpc.data", "tasks.evaluation")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[dict[str, Command]]:
    """The processes of a run that has trained on its first step, by name."""
    keys, found = tmp_path / "keys", {}

    def start(name: str, command: str, role: str, *arguments: str) -> None:
        join = ("--creds", str(keys / RUN / f"{role}.creds"), "--run", RUN)
        found[name] = Command(tmp_path / name, command, *join, *arguments)

    port = str(free_port("127.0.0.1"))
    found["bus"] = Command(tmp_path / "bus", "bus", "--port", port, "--secure", str(keys), "--run", RUN)
    try:
        wait_until(lambda: "bus_ready" in found["bus"].said(), "the bus", found["bus"])
        start("storage", "storage", "storage", *SETTINGS)
        start("learner", "learner", "learner")
        start("actor", "actors", "actor")
        wait_until(lambda: trained(found) >= 1, "a step", found["learner"], timeout_s=180)
        yield found
    finally:
        for command in found.values():
            command.kill()


def trained(started: dict[str, Command]) -> int:
    return len(re.findall(r"step_trained|checkpoint_saved", started["learner"].said()))


@pytest.mark.nightly
def test_run_goes_on_while_its_records_are_forged_erased_and_its_keys_exchanged(
    started: dict[str, Command], tmp_path: Path
):
    asyncio.run(attacked(SecureDirectory(tmp_path / "keys")))
    creds = str(tmp_path / f"keys/{RUN}/actor.creds")
    late = started["late"] = Command(tmp_path / "late", "actors", "--creds", creds, "--run", RUN)
    wait_until(lambda: "actors_starting" in late.said(), "an actor that joins after the attack", late)
    before = progress(tmp_path)
    wait_until(
        lambda: progress(tmp_path) >= before + 3, "three more steps", started["learner"], timeout_s=120
    )
    for command in started.values():
        assert command.process.poll() is None, command.said()
    storage, learner = started["storage"].said(), started["learner"].said()
    assert "credentials_renewed" in storage
    assert "credentials_renewed" in learner
    assert "policy_announced_again" in learner
    for key in ("run", "identity", "heldout"):
        assert re.search(rf"own_key_written_again.*key={key}\b", storage), key


def progress(root: Path) -> int:
    """Return the step that the learner has reached."""
    path = root / f"learner/runs/{RUN}/progress.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else 0


async def attacked(keys: SecureDirectory) -> None:
    """Write forgeries over every record, erase all, and exchange two keys. Return when all are back."""
    files = keys.files(RUN)
    creds = files.creds("operator")
    where = BusConfig(url=load_credentials(creds).url, creds=creds)
    async with Bus.connect(where, RUN, name="enemy") as bus:
        bucket = f"$KV.{bus.topology.bucket}"
        genuine = [(await bus.js.get_last_msg(f"KV_{bus.topology.bucket}", f"{bucket}.{key}")).data
                   for key in ("identity", "policy")]  # fmt: skip
        stranger = {"actors": {"environment": {"reward": "stranger:reward"}}}
        record = RunRecord(name=RUN, config_json=json.dumps(stranger))
        for data in (b"{}", b"", encode(record), *genuine):
            for key in RECORDS:
                await bus.client.publish(f"{bucket}.{key}", data)
            for subject in SUBJECTS:
                await bus.client.publish(bus.subject(subject), data)
        await bus.client.flush()
        await until_back(bus)
        await bus.client.publish(f"{bucket}.role.engine.x", b"", headers={"Nats-Rollup": "all"})
        await bus.client.flush()
        await until_back(bus)
        for role in ("learner", "storage"):
            files.revoke(role)
        async with asyncio.timeout(30):
            while bus.signatures is None or bus.signatures.keys != files.keys:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.1)
        await until_back(bus)


async def until_back(bus: Bus) -> None:
    """Return when every record of the run is there, signed by who may write it."""
    kinds = {"run": RunRecord, "identity": RunIdentity, "heldout": BlobRef, "policy": PolicyManifest}
    async with asyncio.timeout(30):
        for key in RECORDS:
            while await bus.get(key, kinds.get(key, RoleHolder)) is None:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.1)
