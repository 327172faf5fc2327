"""The back end of sandboxes that a configuration names."""

from actors.episode_sandboxes.base import SandboxBackend
from actors.episode_sandboxes.containers import ContainerBackend
from actors.episode_sandboxes.kubernetes import KubernetesBackend
from actors.episode_sandboxes.namespaces import NamespaceBackend
from actors.episode_sandboxes.remote import RemoteBackend
from actors.settings.episode_sandboxes import (
    ContainerSandboxes,
    KubernetesSandboxes,
    RemoteSandboxes,
    SandboxBackendConfig,
)


def build_backend(config: SandboxBackendConfig, *, listens: bool = False) -> SandboxBackend:
    """Build it; `listens` says whether its sandboxes are asked to. Raises ConfigError for one that cannot
    work here."""
    if isinstance(config, ContainerSandboxes):
        return ContainerBackend(config, listens=listens)
    if isinstance(config, KubernetesSandboxes):
        return KubernetesBackend(config)
    if isinstance(config, RemoteSandboxes):
        return RemoteBackend(config)
    return NamespaceBackend.from_config(config)
