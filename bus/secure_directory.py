"""Makes what a secured bus needs: a certificate authority, keys of each role, and nats-server's settings."""

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import nkeys
from cryptography.hazmat.primitives.asymmetric import ec

from bus.certificates import make_certificate, pem
from bus.credentials import BUS_NAME, Credentials, load_credentials
from bus.permissions import ANSWER_WITHIN, ROLES, permissions
from bus.topology import Topology

PROBE = "probe"
"""Account of the process that keeps the server, apart from all runs."""


class SecureDirectory:
    """A directory of credentials: `<run>/<role>.creds` for each role of each run, readable by its owner.

    It also holds the keys of the bus itself, so only the bus's host needs all of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.certificate = path / "bus.pem"
        self.key = path / "bus.key"
        self.probe = path / "probe.creds"

    @property
    def runs(self) -> list[str]:
        """Return the runs that have credentials here."""
        return sorted(found.parent.name for found in self.path.glob("*/operator.creds"))

    def make(self, runs: Sequence[str], url: str) -> None:
        """Make what is missing for these runs. Keys that exist stay; the files take the new `url`.

        Raises `ConfigError` for a name that no run can have.
        """
        for run in runs:
            Topology(run)
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.certificate.exists():
            self._make_certificates()
        self._make_credentials(self.probe, PROBE, "operator", url)
        for run in {*self.runs, *runs}:
            (self.path / run).mkdir(exist_ok=True, mode=0o700)
            for role in reversed(ROLES):  # the operator's last: with it the run counts as made
                self._make_credentials(self.path / run / f"{role}.creds", run, role, url)

    def server_config(self) -> str:
        """Return the part of nats-server's configuration that lets in who has credentials, and no others."""
        accounts = {
            f"run-{run}": {
                "jetstream": "enabled",
                "users": [self._user(run, role) for role in ROLES],
            }
            for run in self.runs
        }
        probe = {"nkey": _public(load_credentials(self.probe).seed)}
        accounts[PROBE] = {"jetstream": "enabled", "users": [probe]}
        tls = {
            "cert_file": str(self.certificate.absolute()),
            "key_file": str(self.key.absolute()),
            "handshake_first": True,  # else somebody in between could have a client go on without TLS
            "min_version": "1.3",
        }
        return f"tls: {json.dumps(tls)}\naccounts: {json.dumps(accounts, indent=1)}\n"

    def _user(self, run: str, role: str) -> dict[str, object]:
        allowed = permissions(run, role)
        rights: dict[str, object] = {
            "publish": {"allow": list(allowed.publish)},
            "subscribe": {"allow": list(allowed.subscribe)},
        }
        if allowed.answers:
            rights["allow_responses"] = {"max": -1, "expires": ANSWER_WITHIN}
        seed = load_credentials(self.path / run / f"{role}.creds").seed
        return {"nkey": _public(seed), "permissions": rights}

    def _make_credentials(self, path: Path, run: str, role: str, url: str) -> None:
        seed = load_credentials(path).seed if path.exists() else _new_seed()
        authority = (self.path / "authority.pem").read_text()
        made = Credentials(run=run, role=role, url=url, seed=seed, authority=authority)
        _write_secret(path, json.dumps(asdict(made), indent=1).encode())

    def _make_certificates(self) -> None:
        """Make an authority, and by it the bus's certificate. The authority's key is not kept."""
        authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        authority = make_certificate("sluice-authority", authority_key)
        certificate = make_certificate(BUS_NAME, key, authority, authority_key)
        _write_secret(self.path / "authority.pem", pem(authority))
        _write_secret(self.key, pem(key))
        _write_secret(self.certificate, pem(certificate))


def _new_seed() -> str:
    return bytes(nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)).decode()


def _public(seed: str) -> str:
    return bytes(nkeys.from_seed(bytearray(seed.encode())).public_key).decode()


def _write_secret(path: Path, data: bytes) -> None:
    """Write a file whole, readable by its owner alone from the beginning."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
