"""The files of one run in a directory of credentials: its own key, the list of its roles' keys, and one for
each role."""

import base64
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from bus.errors import ConfigError
from bus.security.credentials import Credentials, read_credentials
from bus.security.role_keys import RoleKeys, new_seed, public_key
from bus.security.signatures import keys_in, sign_keys
from bus.security.whole_files import write_secret

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
            found = read_credentials(path) if path.exists() else self._new(role)
            key = public_key(found.seed)
            if path.exists() and known and key not in known:
                raise ConfigError(f"the key in {path} was revoked: remove the file, and another one is made")
            if key not in known:
                keys = keys.replaced(role, [key])
            files[role] = replace(found.reaching_streams(), url=url, authority=authority)
        self._write(keys, files)

    def _new(self, role: str) -> Credentials:
        secret = secrets.token_hex(SECRET_BYTES)
        return Credentials(
            run=self._run, role=role, url="", seed=new_seed(), authority="", stream_secret=secret
        )

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
        self._write(keys, {role: replace(read_credentials(self.creds(role)), seed=seed)})

    def _write(self, keys: RoleKeys, files: Mapping[str, Credentials]) -> None:
        run_seed = self._run_key.read_text()
        signed = sign_keys(run_seed, self._run, keys)
        for role in reversed(list(keys.keys)):  # the operator's last: with it the run counts as made
            found = files.get(role) or read_credentials(self.creds(role))
            made = replace(found, run_key=public_key(run_seed), role_keys=base64.b64encode(signed).decode())
            write_secret(self.creds(role), json.dumps(asdict(made), indent=1).encode())
        write_secret(self._list, signed)
