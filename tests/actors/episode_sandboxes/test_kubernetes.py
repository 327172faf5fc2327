"""Sandboxes in pods, against a server that speaks the API of Kubernetes."""

import asyncio
import os
import socket
import sys
from asyncio.subprocess import PIPE
from contextlib import asynccontextmanager

import pytest

from actors.episode_sandboxes.base import EpisodeSandbox
from actors.episode_sandboxes.kubernetes import KubernetesBackend
from actors.episodes.errors import ToolError, ToolFailedError
from actors.settings.episode_sandboxes import KubernetesSandboxes, SandboxLimits
from bus.errors import ConfigError
from tests.actors.episode_sandboxes.backends import said
from tests.actors.episode_sandboxes.cluster import cluster
from tests.actors.episode_sandboxes.protocol import does_what_a_sandbox_does


@pytest.fixture
def token(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    return tmp_path / "token"


@asynccontextmanager
async def backend_of(token, url):
    backend = KubernetesBackend(
        KubernetesSandboxes(image="tiny:1", api=url, namespace="train", token_file=token, certificate="host")
    )
    try:
        yield backend
    finally:
        await backend.close()


async def test_a_pod_does_what_a_sandbox_does(token):
    async with cluster() as (found, url), backend_of(token, url) as backend:
        sandbox = EpisodeSandbox(await backend.start(None, SandboxLimits(memory_mb=64, disk_mb=9)))
        [body] = found.described.values()
        [container] = body["spec"]["containers"]
        assert container["resources"]["limits"] == {"memory": "64Mi", "ephemeral-storage": "9Mi", "cpu": "1"}
        labels = body["metadata"]["labels"]
        assert {**labels, "gateway": ""} == labels
        assert {"app": labels["app"]} == found.policies[0]["spec"]["podSelector"]["matchLabels"]
        await does_what_a_sandbox_does(sandbox)
        await sandbox.close()
        assert found.pods == {}
        with pytest.raises(ToolFailedError, match="has ended"):
            await said(sandbox, "true")


async def test_pods_go_to_the_port_of_their_own_gateway(token):
    async with cluster() as (found, url), backend_of(token, url) as backend:
        for port in (8001, 8002):
            await backend.start(None, SandboxLimits(), f"http://127.0.0.1:{port}")
        [(one, other)] = [{each["metadata"]["labels"]["gateway"] for each in found.described.values()}]
        ports = {each["metadata"]["name"]: each["spec"].get("egress") for each in found.policies}
        assert {ports[name][0]["ports"][0]["port"] for name in (one, other)} == {8001, 8002}
        assert all(each["spec"]["hostAliases"] == [] for each in found.described.values())


LEAVE = """
import asyncio, os, sys
from actors.episode_sandboxes.kubernetes import KubernetesBackend
from actors.settings.episode_sandboxes import KubernetesSandboxes, SandboxLimits
async def main():
    config = KubernetesSandboxes(
        image="tiny:1", api=sys.argv[1], namespace="train", token_file=sys.argv[2], certificate="host"
    )
    print((await KubernetesBackend(config).start(None, SandboxLimits())).name, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
USERS = ("--user",) if os.geteuid() else ()
IN_A_CONTAINER = ("unshare", *USERS, "--pid", "--fork", "--kill-child", "--mount-proc")
"""Has a process be the first of its container, as each actor of a pod is."""


async def test_pods_stay_while_the_container_of_their_actor_lives_and_the_next_one_removes_them(token):
    async with cluster() as (found, url):
        command = (*IN_A_CONTAINER, sys.executable, "-c", LEAVE, url, str(token))
        actor = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        async with asyncio.timeout(120):
            left = (await actor.stdout.readline()).decode().strip()
            async with backend_of(token, url) as backend:
                await backend.start(None, SandboxLimits())
                assert left in found.pods
            await actor.communicate(b"end\n")
            async with backend_of(token, url) as backend:
                await backend.start(None, SandboxLimits())
        assert left not in found.pods


async def test_a_cluster_removes_sandboxes_with_the_pod_of_their_actor_alone(token):
    name = socket.gethostname()
    async with cluster() as (found, url):
        for address, owners in ((socket.gethostbyname(name), [f"uid of {name}"]), ("192.0.2.9", [])):
            found.actors[name] = address
            async with backend_of(token, url) as backend:
                pod = await backend.start(None, SandboxLimits())
                described = found.described[pod.name]["metadata"]["ownerReferences"]
                assert [one["uid"] for one in described] == owners


async def test_what_a_cluster_refuses_is_told(token):
    async with cluster() as (found, url):
        async with backend_of(token, url) as backend:
            with pytest.raises(ToolError, match="pods is forbidden"):
                await backend.start("forbidden", SandboxLimits())
            found.fails = True
            with pytest.raises(ToolError, match="of tiny:1 has failed"):
                await backend.start(None, SandboxLimits())
            assert found.pods == {}
        token.write_text("wrong")
        async with backend_of(token, url) as backend:
            for _ in range(2):  # no pod starts before its network is closed
                with pytest.raises(ToolError, match="closes no pod's network: Unauthorized"):
                    await backend.start(None, SandboxLimits())
    with pytest.raises(ConfigError, match="there is no token_file=/nowhere"):
        KubernetesBackend(KubernetesSandboxes(image="tiny:1", token_file="/nowhere"))
