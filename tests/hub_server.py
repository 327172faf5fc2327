"""A server that speaks the part of the Hugging Face hub's API that `snapshot_download` asks for."""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT, NEWER = "a" * 40, "b" * 40


@dataclass(frozen=True)
class Repo:
    """What the hub has."""

    name: str
    files: Mapping[str, bytes]
    kind: str = "models"
    """Its kind in the paths of the API: `models` or `datasets`."""


class Hub(BaseHTTPRequestHandler):
    """Answers what `snapshot_download` asks of a repository."""

    def do_GET(self) -> None:
        repo = self.server.repo
        self.server.asked.append(self.path)
        if f"{self.path}/".startswith(f"/api/{repo.kind}/{repo.name}/"):
            names = [{"rfilename": name} for name in repo.files]
            found = json.dumps({"id": repo.name, "sha": self._commit, "siblings": names}).encode()
            if "/tree/" in self.path:
                entries = [
                    {"type": "file", "path": name, "oid": "b" * 40, "size": len(text)}
                    for name, text in repo.files.items()
                ]
                found = json.dumps(entries).encode()
            return self._answer(found)
        below = "" if repo.kind == "models" else f"{repo.kind}/"
        prefix = f"/{below}{repo.name}/resolve/{self._commit}/"
        if self.path.startswith(prefix) and (name := self.path.removeprefix(prefix)) in repo.files:
            return self._answer(repo.files[name])
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    @property
    def _commit(self) -> str:
        """Return the commit that the path names, or else the newest."""
        named = re.search(r"\b[a-d]{40}\b", self.path)
        return named[0] if named else self.server.newest

    do_HEAD = do_GET  # noqa: N815 - the name that http.server asks for

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hash(body) & 0xFFFFFFFF:x}"')
        self.send_header("X-Repo-Commit", self._commit)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing: each request would be a line."""


@contextmanager
def serving(repo: Repo) -> Iterator[ThreadingHTTPServer]:
    """Serve a repository, whose newest commit is the server's `newest`; `asked` are the paths so far."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repo, server.newest, server.asked = repo, COMMIT, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
