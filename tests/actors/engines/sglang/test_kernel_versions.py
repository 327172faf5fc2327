"""A server that is to compute as the learner does has the learner's versions of SGLang, torch and Triton."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from actors.engines.on_policy import on_policy
from actors.engines.sglang.server import kernel_versions
from actors.engines.sglang.server.kernel_versions import learners_kernels
from actors.environments.base import Environment
from actors.service import ActorSettings, run_actors
from actors.settings.actors import ActorsConfig, SamplingConfig
from actors.settings.engines import SglangEngineConfig
from bus.connection import Bus
from bus.errors import ConfigError
from bus.messages import BlobRef, PolicyManifest
from bus.process.kernel_versions import differences, installed

SERVER = {"sglang": "0.5.17", "torch": "2.9.1", "triton": "3.5.1"}
BLOB = BlobRef(subject="blob", chunks=1, size_bytes=1, digest="")
MANIFEST = PolicyManifest(policy_version=0, incarnation="one", snapshot=BLOB, model=BLOB, stage="rl")


def engine(directory: Path, **changed: str) -> SglangEngineConfig:
    """Settings with an interpreter that has packages of these versions."""
    for name, version in (SERVER | changed).items():
        described = directory / f"{name}-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    environment = {"PYTHONPATH": str(directory)}
    return on_policy(SglangEngineConfig(python=Path(sys.executable), environment=environment))


class Idle(Environment):
    async def run(self, task, policy):
        raise NotImplementedError


@pytest.mark.nats
async def test_an_actor_with_other_kernels_than_the_learners_does_not_start(bus: Bus, tmp_path: Path):
    learner = SERVER | {"sglang": "0.5.23"}
    await bus.swap("policy", replace(MANIFEST, kernels=learner), 0)
    own = engine(tmp_path)
    settings = ActorSettings(
        actors=ActorsConfig(engine=own), sampling=SamplingConfig(), shards=1, max_staleness=4,
        logs=tmp_path, rollout_engine=own,
    )  # fmt: skip
    said = r"sglang 0\.5\.17 at the server and 0\.5\.23 at the learner\. .*same versions"
    with pytest.raises(ConfigError, match=said):
        await run_actors(bus, settings, Idle(), asyncio.Event())


async def test_the_same_versions_in_other_builds_agree(tmp_path):
    assert await learners_kernels(engine(tmp_path, torch="2.9.1+cu130"), SERVER) == SERVER
    assert await learners_kernels(SglangEngineConfig(), SERVER) == {}, "it has an arithmetic of its own"


async def test_an_interpreter_that_cannot_tell_its_packages_is_named(tmp_path, monkeypatch):
    own, broken = engine(tmp_path), tmp_path / "python"
    other = own.model_copy(update={"python": broken})
    broken.write_text("#!/bin/sh\necho no module named encodings >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match=r"ended with status 3 .*no module named encodings"):
        await learners_kernels(other, SERVER)
    broken.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(kernel_versions, "ASK_S", 0.1)
    with pytest.raises(ConfigError, match=r"did not tell its packages within 0\.1 s"):
        await learners_kernels(other, SERVER)
    broken.chmod(0o644)
    with pytest.raises(ConfigError, match=r"cannot execute .*Permission denied"):
        await learners_kernels(other, SERVER)


def test_a_package_that_one_side_lacks_is_a_difference():
    assert differences(SERVER, SERVER) == ""
    assert differences({}, {"triton": "3.5.1"}) == "triton none at the server and 3.5.1 at the learner"
    assert set(installed()) == set(SERVER)
