"""Who may take tasks from `launch gateway`: those who have credentials of the run, where there are any."""

from bus.errors import ConfigError
from bus.security.credentials import load_credentials
from bus.server.nats_server import is_loopback
from launch.settings.run_config import RunConfig

PURPOSE = "gateway"


def gateway_token(config: RunConfig) -> str | None:
    """Return what clients show as a bearer token; None on a bus without credentials. Raises `ConfigError`."""
    return None if config.bus.creds is None else load_credentials(config.bus.creds).token(PURPOSE)


def refuse_open_gateway(config: RunConfig) -> None:
    """Raise `ConfigError` for a gateway beyond loopback that everybody could use, or whose requests could be
    read, unless this host allows it."""
    gateway = config.actors.environment.public_gateway
    if gateway is None or is_loopback(gateway.host) or config.allow.insecure:
        return
    if config.bus.creds is None:
        raise ConfigError(
            f"gateway.host={gateway.host} would let everybody on the network take tasks and post rewards, "
            "since no credentials are asked for: use a bus with credentials (`launch bus --secure`) and give "
            "--creds, listen at 127.0.0.1, or give --insecure on a network of your own"
        )
    if gateway.certificate is None:
        raise ConfigError(
            f"gateway.host={gateway.host} without TLS would show tokens and tasks to the network: give "
            "--certificate and --certificate-key, listen at 127.0.0.1 behind a proxy that speaks TLS, or "
            "give --insecure on a network of your own"
        )
