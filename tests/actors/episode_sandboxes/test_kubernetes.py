"""Sandboxes in pods, against a server that speaks the API of Kubernetes."""

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
            with pytest.raises(ToolError, match="closes no pod's network: Unauthorized"):
                await backend.start(None, SandboxLimits())
    with pytest.raises(ConfigError, match="there is no token_file=/nowhere"):
        KubernetesBackend(KubernetesSandboxes(image="tiny:1", token_file="/nowhere"))
