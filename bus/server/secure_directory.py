"""Makes what a secured bus needs: a certificate authority, keys of each role, and nats-server's settings."""

import base64
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from bus.errors import ConfigError
from bus.security.certificates import make_certificate, pem
from bus.security.credentials import BUS_NAME, Credentials, load_credentials
from bus.security.permissions import ROLES, permissions
from bus.security.role_keys import RoleKeys, new_seed, public_key
from bus.security.signatures import keys_in, sign_keys
from bus.security.stream_access import MULTIPLE_ANSWERS_S, StreamAccess, has_several_answers
from bus.security.whole_files import write_secret
from bus.server.nats_server import quoted
from bus.topology import Topology

SECRET_BYTES = 24
"""Size of the secret by which a role reaches the run's streams."""


class RunKeyFiles:
    """Makes and changes `<role>.creds` of each role, and `role.keys`, which `run.key` signs."""

    def __init__(self, directory: Path, run: str) -> None:
        self._directory = directory
        self._run = run
        self._run_key = directory / "run.key"
        self._list = directory / "role.keys"

    def creds(self, role: str) -> Path:
        return self._directory / f"{role}.creds"

    @property
    def keys(self) -> RoleKeys:
        """Return the list of keys; it is empty before `make`."""
        return keys_in(self._list.read_bytes()) if self._list.exists() else RoleKeys(revision=0)

    def make(self, roles: Iterable[str], url: str, authority: str) -> None:
        """Make what is missing. Keys that exist stay; each file gets `url` and the newest list.

        A role whose file is missing gets a key that replaces all that it had. Raises `ConfigError` for a file
        with a key that was revoked."""
        if not self._run_key.exists():
            write_secret(self._run_key, new_seed().encode())
        files, keys = {}, self.keys
        for role in roles:
            path, known = self.creds(role), keys.of(role)
            found = load_credentials(path) if path.exists() else self._new(role)
            key = public_key(found.seed)
            if path.exists() and known and key not in known:
                raise ConfigError(f"the key in {path} was revoked: remove the file, and another one is made")
            if key not in known:
                keys = keys.replaced(role, [key])
            files[role] = replace(found, url=url, authority=authority)
        self._write(keys, files)

    def _new(self, role: str) -> Credentials:
        secret = secrets.token_hex(SECRET_BYTES)
        return Credentials(
            run=self._run, role=role, url="", seed=new_seed(), authority="", run_key="", role_keys="",
            stream_secret=secret,
        )  # fmt: skip

    def rotate(self, role: str) -> None:
        """Give a role another key, besides those that it has."""
        self._replace(role, keep=True)

    def revoke(self, role: str) -> None:
        """Take from a role all keys but the newest; one that has a single key gets another instead of it."""
        known = self.keys.of(role)
        if len(known) > 1:
            self._write(self.keys.replaced(role, known[-1:]), {})
        else:
            self._replace(role, keep=False)

    def _replace(self, role: str, *, keep: bool) -> None:
        seed, known = new_seed(), self.keys.of(role)
        keys = self.keys.replaced(role, [*(known if keep else ()), public_key(seed)])
        self._write(keys, {role: replace(load_credentials(self.creds(role)), seed=seed)})

    def _write(self, keys: RoleKeys, files: Mapping[str, Credentials]) -> None:
        run_seed = self._run_key.read_text()
        signed = sign_keys(run_seed, self._run, keys)
        for role in reversed(list(keys.keys)):  # the operator's last: with it the run counts as made
            found = files.get(role) or load_credentials(self.creds(role))
            made = replace(found, run_key=public_key(run_seed), role_keys=base64.b64encode(signed).decode())
            write_secret(self.creds(role), json.dumps(asdict(made), indent=1).encode())
        write_secret(self._list, signed)


PROBE = "probe"
"""Account of the process that keeps the server, apart from all runs."""


class SecureDirectory:
    """A directory of credentials: `<run>/<role>.creds` for each role of each run, readable by its owner.

    It also holds the keys of the bus itself and the one by which each run signs the list of its roles' keys,
    so only the bus's host needs all of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.certificate = path / "bus.pem"
        self.key = path / "bus.key"
        self.probe = path / "probe.creds"

    @property
    def runs(self) -> list[str]:
        return sorted(found.parent.name for found in self.path.glob("*/operator.creds"))

    def make(self, runs: Sequence[str], url: str) -> None:
        """Make what is missing for these runs. Keys that exist stay; the files take the new `url`. Raises
        `ConfigError` for a name that no run can have."""
        for run in runs:
            Topology(run)
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.certificate.exists():
            self._make_certificates()
        authority = (self.path / "authority.pem").read_text()
        RunKeyFiles(self.path, PROBE).make([PROBE], url, authority)
        for run in {*self.runs, *runs}:
            (self.path / run).mkdir(exist_ok=True, mode=0o700)
            self.files(run).make(ROLES, url, authority)

    def files(self, run: str) -> RunKeyFiles:
        return RunKeyFiles(self.path / run, run)

    def refuse_unknown(self, run: str, role: str) -> None:
        """Raise `ConfigError` for a run that has no credentials here, and for a role that there is not."""
        if run not in self.runs:
            known = f"those of {', '.join(self.runs)}" if self.runs else "none"
            raise ConfigError(f"{self.path} has no credentials of run {run!r}, but {known}: name one of them")
        if role not in ROLES:
            raise ConfigError(f"there is no role {role!r}: name one of {', '.join(ROLES)}")

    def server_config(self) -> str:
        """Return the part of nats-server's configuration that lets in who has credentials, and no others."""
        accounts: dict[str, object] = {}
        for run in self.runs:
            accounts |= self._accounts(run)
        probe = {"nkey": public_key(load_credentials(self.probe).seed)}
        accounts[PROBE] = {"jetstream": "enabled", "users": [probe]}
        files = (
            f"cert_file: {quoted(str(self.certificate.absolute()))}, "
            f"key_file: {quoted(str(self.key.absolute()))}"
        )
        # the handshake is first, else somebody in between could have a client go on without TLS
        tls = f'{files}, handshake_first: true, min_version: "1.3"'
        return f"tls: {{ {tls} }}\naccounts: {json.dumps(accounts, indent=1)}\n"

    def _accounts(self, run: str) -> dict[str, object]:
        # The name decides where nats-server keeps the streams on disk.
        streams, roles, files = f"run-{run}", f"roles-{run}", self.files(run)
        credentials = {role: load_credentials(files.creds(role)) for role in ROLES}
        stored = sorted({subject for role in ROLES for subject in permissions(run, role).stored})
        imports = [one for found in credentials.values() for one in _imports(found, streams)]
        users = [_user(credentials[role], key) for role in ROLES for key in files.keys.of(role)]
        return {
            streams: {"jetstream": "enabled", "exports": [_export(subject, roles) for subject in stored]},
            roles: {"imports": imports, "users": users},
        }

    def _make_certificates(self) -> None:
        """Make an authority, and by it the bus's certificate. The authority's key is not kept."""
        authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        authority = make_certificate("sluice-authority", authority_key)
        certificate = make_certificate(BUS_NAME, key, authority, authority_key)
        write_secret(self.path / "authority.pem", pem(authority))
        write_secret(self.key, pem(key))
        write_secret(self.certificate, pem(certificate))


def _user(credentials: Credentials, key: str) -> dict[str, object]:
    allowed, prefix = permissions(credentials.run, credentials.role), StreamAccess.of(credentials).prefix
    rights = {
        "publish": {"allow": [*allowed.publish, *(f"{prefix}{subject}" for subject in allowed.stored)]},
        "subscribe": {"allow": list(allowed.subscribe)},
    }
    return {"nkey": key, "permissions": rights}


def _imports(credentials: Credentials, streams: str) -> list[dict[str, object]]:
    """Return what a role reaches of the account `streams`, under the prefix that is its own."""
    stored = permissions(credentials.run, credentials.role).stored
    prefix = StreamAccess.of(credentials).prefix
    return [
        {"service": {"account": streams, "subject": subject}, "to": f"{prefix}{subject}"}
        for subject in stored
    ]


def _export(subject: str, roles: str) -> dict[str, object]:
    export: dict[str, object] = {"service": subject, "accounts": [roles]}
    if has_several_answers(subject):
        export |= {"response_type": "stream", "threshold": f"{MULTIPLE_ANSWERS_S}s"}
    return export
