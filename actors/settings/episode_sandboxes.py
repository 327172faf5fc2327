"""Settings of episodes' sandboxes: where they run, and what they may use. Loads without torch."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from bus.config import Config
from bus.errors import nearest


class SandboxLimits(Config):
    """What one sandbox may use."""

    cpu_s: int = Field(600, ge=1)
    """Processor time of each process."""
    memory_mb: int = Field(1024, ge=64)
    """Memory of all processes of a sandbox together, in MiB. Where they take more, they are all ended; its
    files stay."""
    processes: int = Field(128, ge=8)
    """Processes and threads of a sandbox at a time."""
    cpus: float = Field(1.0, ge=0.01)
    """Processors of a sandbox. Daytona takes whole ones; in E2B the template has them and the memory."""
    disk_mb: int = Field(256, ge=1)
    """Size of the workspace, in MiB, and of /tmp and /dev/shm each."""


class HostBudgetConfig(Config):
    """What the sandboxes of all actors of a user on this host may use together; further ones wait."""

    sandboxes: int | None = Field(None, ge=1)
    """Most sandboxes at a time; `None` is any number."""
    memory_mb: int | None = Field(None, ge=64)
    """Sum of the sandboxes' `memory_mb`."""
    disk_mb: int | None = Field(None, ge=1)
    """Sum of the sandboxes' `disk_mb`."""
    cpus: float | None = Field(None, ge=0.01)
    """Sum of the sandboxes' `cpus`."""
    wait_s: float = Field(3600.0, gt=0)
    """Longest time that an episode waits for its sandbox, also for one of `at_once`; then it fails."""

    @property
    def amounts(self) -> tuple[float | None, ...]:
        return self.sandboxes, self.memory_mb, self.disk_mb, self.cpus


PROFILE = "sandbox_profile"
"""Field of a prompt's metadata that names image and limits of its sandbox."""
WRITABLE = r"/(workspace|tmp)(/(?!\.\.?(/|$))[\w.-]+)*"


class NamespaceSandboxes(Config):
    """Sandboxes in namespaces of the actor's host: its programs read-only, without its data and network."""

    uses_host: ClassVar[bool] = True
    """Whether sandboxes take memory and disk of the actor's host."""
    is_server: ClassVar[bool] = False
    """Whether a server starts them, which actors of several hosts ask."""
    type: Literal["namespaces"] = "namespaces"
    """Name of the back end."""
    readable: tuple[Path, ...] = ()
    """Further files and directories of the host that a sandbox sees, read-only."""
    links: dict[str, str] = Field(default_factory=dict)
    """Further names of directories that can be written, as in `{ "/app" = "/workspace" }`."""

    @field_validator("links")
    @classmethod
    def _lead_to_what_is_written(cls, links: dict[str, str]) -> dict[str, str]:
        for name, target in links.items():
            if not (re.fullmatch(r"/[\w.-]+", name) and re.fullmatch(WRITABLE, target)):
                raise ValueError(
                    f"{name} -> {target}: link a name below / to a directory of /workspace or /tmp"
                )
        return links


class ContainerSandboxes(Config):
    """Sandboxes in containers of Docker or Podman on the actor's host, without network."""

    uses_host: ClassVar[bool] = True
    """Whether sandboxes take memory and disk of the actor's host."""
    is_server: ClassVar[bool] = False
    """Whether a server starts them, which actors of several hosts ask."""
    type: Literal["docker"] = "docker"
    """Name of the back end."""
    image: str
    """Image of sandboxes, or template of E2B, with `sh`, `cat`, `env`, `mkdir`, `mkfifo` and `tar`; at a
    service with Debian's usual programs. Metadata `sandbox_image` of a prompt names another."""
    socket: Path = Path("/var/run/docker.sock")
    """Socket of the daemon; that of Podman is /run/podman/podman.sock, or podman/podman.sock below
    XDG_RUNTIME_DIR."""
    user: str | None = None
    """User of the image that commands run as; `None` is the image's own."""
    disk_quota: bool = False
    """Whether the daemon holds a container's files to `disk_mb`, which needs a storage driver with quotas.
    Without it `disk_mb` bounds each file alone."""
    life_s: float = Field(86400.0, ge=1)
    """Longest life of a sandbox, after which it ends by itself; some plans of E2B take 3600 at most."""


class RemoteSandboxes(Config):
    """Sandboxes on other hosts, behind a server (`actors/episode_sandboxes/http_contract.py`)."""

    uses_host: ClassVar[bool] = False
    """Whether sandboxes take memory and disk of the actor's host."""
    is_server: ClassVar[bool] = True
    """Whether a server starts them, which actors of several hosts ask."""
    type: Literal["http"] = "http"
    """Name of the back end."""
    url: str = Field(pattern=r"^https?://.+[^/]$")
    """Address of the server, without a slash at its end."""
    token_variable: str = "SLUICE_SANDBOX_TOKEN"
    """Environment variable of the actor that holds the server's token."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Longest time until a sandbox runs, its wait for room and for its image included."""


class KubernetesSandboxes(Config):
    """Sandboxes in pods of Kubernetes 1.30 or later, one in each, without network where the cluster's network
    plug-in heeds policies."""

    uses_host: ClassVar[bool] = False
    """Whether sandboxes take memory and disk of the actor's host."""
    is_server: ClassVar[bool] = False
    """Whether a server starts them, which actors of several hosts ask."""
    type: Literal["kubernetes"] = "kubernetes"
    """Name of the back end."""
    image: str
    """Image of sandboxes, or template of E2B, with `sh`, `cat`, `env`, `mkdir`, `mkfifo` and `tar`; at a
    service with Debian's usual programs. Metadata `sandbox_image` of a prompt names another."""
    api: str = Field("https://kubernetes.default.svc", pattern=r"^https?://.+[^/]$")
    """Address of the cluster's API, without a slash at its end."""
    namespace: str = "default"
    """Namespace of the pods."""
    token_file: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
    """File of the token of an account that may make, list, see and delete pods, make their `exec`, and make
    network policies."""
    certificate: Literal["host"] | Path = Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
    """File of the authority that vouches for the API's address; `host` means those of this host."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Longest time until a sandbox runs, its wait for room and for its image included."""
    life_s: float = Field(86400.0, ge=1)
    """Longest life of a sandbox, after which it ends by itself; some plans of E2B take 3600 at most."""


class HostedSandboxes(Config):
    """Sandboxes of a service that others run: E2B, Modal or Daytona, by its own package and with its keys."""

    uses_host: ClassVar[bool] = False
    """Whether sandboxes take memory and disk of the actor's host."""
    is_server: ClassVar[bool] = False
    """Whether a server starts them, which actors of several hosts ask."""
    type: Literal["e2b", "modal", "daytona"]
    """Name of the service, and of the package that asks it, which reads its keys from its own variables."""
    image: str
    """Image of sandboxes, or template of E2B, with `sh`, `cat`, `env`, `mkdir`, `mkfifo` and `tar`; at a
    service with Debian's usual programs. Metadata `sandbox_image` of a prompt names another."""
    app: str = "sluice"
    """App of Modal that sandboxes belong to."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Longest time until a sandbox runs, its wait for room and for its image included."""
    life_s: float = Field(86400.0, ge=1)
    """Longest life of a sandbox, after which it ends by itself; some plans of E2B take 3600 at most."""


# Flags of a union want the settings of one name to have one description (cyclopts).
SandboxBackendConfig = Annotated[
    NamespaceSandboxes | ContainerSandboxes | RemoteSandboxes | KubernetesSandboxes | HostedSandboxes,
    Field(discriminator="type"),
]


class SandboxProfile(Config):
    """Image and limits of some prompts' sandboxes; `None` is what those of other prompts have."""

    image: str | None = None
    """Image of these sandboxes, for a back end that has images."""
    cpu_s: int | None = Field(None, ge=1)
    """Processor time of each process."""
    memory_mb: int | None = Field(None, ge=64)
    """Memory of all processes together, in MiB."""
    processes: int | None = Field(None, ge=8)
    """Processes and threads at a time."""
    cpus: float | None = Field(None, ge=0.01)
    """Processors of a sandbox."""
    disk_mb: int | None = Field(None, ge=1)
    """Size of the workspace, in MiB, and of /tmp and /dev/shm each."""


class HostSandboxes(SandboxLimits):
    """What sandboxes may use, each and together."""

    host_budget: HostBudgetConfig = HostBudgetConfig()
    """What the sandboxes of all actors of this host may use together."""
    warm: int = Field(0, ge=0)
    """Sandboxes that are started ahead of the episodes that will need one, besides those in use."""
    backend: SandboxBackendConfig = NamespaceSandboxes()
    """Where sandboxes run."""

    @model_validator(mode="after")
    def _host_has_them(self) -> Self:
        if not self.backend.uses_host and self.host_budget != HostBudgetConfig():
            raise ValueError(
                "`host_budget` bounds sandboxes of this host: leave it out, or set it where their server runs"
            )
        return self

    @model_validator(mode="after")
    def _one_finds_room(self) -> Self:
        for whose, limits in self.all_limits.items():
            for name in ("memory_mb", "disk_mb", "cpus"):
                each, together = getattr(limits, name), getattr(self.host_budget, name)
                if together is not None and each > together:
                    raise ValueError(
                        f"{name}={each} of a sandbox{whose} exceeds host_budget.{name}={together}: none "
                        "would ever start"
                    )
        return self

    @property
    def all_limits(self) -> dict[str, SandboxLimits]:
        """Return the limits that sandboxes may have, each by words for whose sandbox it is."""
        return {"": self}


class EpisodeSandboxes(HostSandboxes):
    """Sandboxes of episodes, whose prompts may name a profile."""

    profiles: dict[str, SandboxProfile] = Field(default_factory=dict)
    """Further images and limits by name, for prompts whose metadata `sandbox_profile` names one."""

    @model_validator(mode="after")
    def _backend_has_images(self) -> Self:
        named = [name for name, profile in self.profiles.items() if profile.image is not None]
        if named and isinstance(self.backend, NamespaceSandboxes):
            raise ValueError(
                f"profiles.{named[0]}.image: sandboxes in namespaces have this host's programs, and no image"
            )
        return self

    @property
    def all_limits(self) -> dict[str, SandboxLimits]:
        return {"": self, **{f" with profile {name!r}": self.limits(name) for name in self.profiles}}

    def limits(self, profile: str) -> SandboxLimits:
        """Return what a sandbox may use whose prompt names this profile."""
        usual = {name: getattr(self, name) for name in SandboxLimits.model_fields}
        own = self.profiles[profile].model_dump(exclude={"image"}, exclude_none=True)
        return SandboxLimits.model_validate(usual | own)

    def refused_profile(self, metadata: Mapping[str, object]) -> str | None:
        """Return why a prompt cannot have the profile that its metadata name, and the remedy; None if it
        can."""
        name = metadata.get(PROFILE)
        if name is None or (isinstance(name, str) and name in self.profiles):
            return None
        known = ", ".join(self.profiles) or "none"
        return (
            f"it names the sandbox profile {name!r}: {nearest(name, self.profiles)}there are {known}; define "
            "it in `profiles` of the sandbox's settings"
        )


class ProgramSandboxes(EpisodeSandboxes):
    """Sandboxes in which the programs of agents run, one in each. An image of Docker needs `python3`, which
    brings requests to the gateway."""

    check: str | None = None
    """Shell command by which the reward `sandbox_check` judges the workspace that the program left, as that
    of the tool `sandbox` does. It may take `reward_timeout_s`."""


class SandboxServerConfig(HostSandboxes):
    """Server of sandboxes for actors on other hosts."""

    at_once: int = Field(32, ge=1)
    """Most sandboxes that are lent at a time; actors wait for further ones."""
    host: str = "127.0.0.1"
    """Address to listen at. Requests are not encrypted: beyond this host have a proxy do that."""
    port: int = Field(8900, ge=0, le=65535)
    """Port to listen on; 0 takes any that is free."""
    token_variable: str = "SLUICE_SANDBOX_TOKEN"
    """Environment variable that holds the token which clients give."""
    idle_s: float = Field(1800.0, gt=0)
    """Time without a command after which a sandbox is ended, since its actor may be gone."""

    @model_validator(mode="after")
    def _starts_them_itself(self) -> Self:
        if self.backend.is_server:
            raise ValueError(
                f"backend.type={self.backend.type}: a server of sandboxes starts them itself: give actors "
                "that server's url, or choose another back end"
            )
        return self
