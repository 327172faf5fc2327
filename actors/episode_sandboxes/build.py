"""The back end of sandboxes that a configuration names."""

from importlib import import_module

from actors.episode_sandboxes.base import SandboxBackend
from actors.episode_sandboxes.containers import ContainerBackend
from actors.episode_sandboxes.hosted import HostedBackend, HostedService
from actors.episode_sandboxes.kubernetes import KubernetesBackend
from actors.episode_sandboxes.namespaces import NamespaceBackend
from actors.episode_sandboxes.remote import RemoteBackend
from actors.settings.episode_sandboxes import (
    ContainerSandboxes,
    HostedSandboxes,
    KubernetesSandboxes,
    RemoteSandboxes,
    SandboxBackendConfig,
)
from bus.errors import ConfigError

SERVICES = {"e2b": "E2BService", "modal": "ModalService", "daytona": "DaytonaService"}
"""Classes that ask services by their packages, which need not be there."""


def build_backend(config: SandboxBackendConfig) -> SandboxBackend:
    """Build the back end. Raises ConfigError for one that cannot work here."""
    if isinstance(config, ContainerSandboxes):
        return ContainerBackend(config)
    if isinstance(config, KubernetesSandboxes):
        return KubernetesBackend(config)
    if isinstance(config, RemoteSandboxes):
        return RemoteBackend(config)
    if isinstance(config, HostedSandboxes):
        return HostedBackend(config, _service(config))
    return NamespaceBackend.from_config(config)


def _service(config: HostedSandboxes) -> HostedService:
    try:
        module = import_module(f"actors.episode_sandboxes.{config.type}_service")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("actors."):
            raise
        raise ConfigError(
            f"sandboxes of {config.type} need its package: pip install 'sluice-rl[{config.type}]', or have "
            "actors.episode_sandboxes.server ask it from another environment"
        ) from error
    service: HostedService = getattr(module, SERVICES[config.type])(config)
    return service
