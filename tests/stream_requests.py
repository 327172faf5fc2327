"""Streams of a test's run, asked for all at once over a plain socket: a client that asks for one after
another takes twice as long, and each test on a bus has 9 streams and 8 consumers."""

import json
import socket
import time
from collections.abc import Sequence
from functools import cache
from urllib.parse import urlsplit

from bus.connection.jetstream import NO_STORE
from bus.topology import Topology

TIMEOUT_S = 60
Request = tuple[str, bytes]
"""The end of a subject of JetStream's API, and what is sent there."""


class StreamRequests:
    """A connection to the server at `url`: `with StreamRequests(url) as requests:`."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._socket = socket.create_connection((where.hostname, where.port), timeout=TIMEOUT_S)
        self._received = self._socket.makefile("rb")
        self._received.readline()  # what the server says of itself
        self._socket.sendall(b'CONNECT {"verbose": false}\r\nSUB answer.* 1\r\n')

    def __enter__(self) -> "StreamRequests":
        return self

    def __exit__(self, *_: object) -> None:
        self._received.close()
        self._socket.close()

    def remove_all(self) -> None:
        """Remove what earlier tests left on the server."""
        [found] = self._answers([("STREAM.NAMES", b"")])
        self._have_done([(f"STREAM.DELETE.{name}", b"") for name in found["streams"] or ()])

    def create(self, topology: Topology, shards: int) -> None:
        """Create a run's streams, consumers and keys, as `ensure` and `ensure_keys` do."""
        for requests in creation(topology, shards):
            self._have_done(requests)

    def _have_done(self, requests: Sequence[Request]) -> None:
        """Ask, and again while the server removes the directory that a deleted stream left."""
        deadline = time.monotonic() + TIMEOUT_S
        while requests:
            refused = [
                (request, answer["error"])
                for request, answer in zip(requests, self._answers(requests), strict=True)
                if "error" in answer
            ]
            for (subject, _), error in refused:
                if error["err_code"] != NO_STORE or time.monotonic() > deadline:
                    raise RuntimeError(f"nats-server refuses {subject} of a test: {error}")
            requests = [request for request, _ in refused]

    def _answers(self, requests: Sequence[Request]) -> list[dict]:
        self._socket.sendall(
            b"".join(
                b"PUB $JS.API.%s answer.%d %d\r\n%s\r\n" % (subject.encode(), number, len(content), content)
                for number, (subject, content) in enumerate(requests)
            )
        )
        answers = dict(self._next_answer() for _ in requests)
        return [answers[number] for number in range(len(requests))]

    def _next_answer(self) -> tuple[int, dict]:
        """Return the number of a request, and its answer."""
        while not (line := self._received.readline()).startswith(b"MSG"):
            if not line.startswith((b"PING", b"INFO")):
                raise RuntimeError(f"nats-server says {line!r} where it should answer")
        _, subject, *_, size = line.split()
        content = self._received.read(int(size))
        self._received.readline()
        return int(subject.removeprefix(b"answer.")), json.loads(content)


@cache
def creation(topology: Topology, shards: int) -> tuple[list[Request], list[Request]]:
    """Return the requests for the streams, and those for their consumers, which need the streams."""
    streams = [
        (f"STREAM.CREATE.{stream.name}", json.dumps(stream.as_dict()).encode())
        for stream in (*topology.streams(shards), topology.keys())
    ]
    consumers = [
        (
            f"CONSUMER.DURABLE.CREATE.{topology.stream(stream)}.{consumer.durable_name}",
            json.dumps({"stream_name": topology.stream(stream), "config": consumer.as_dict()}).encode(),
        )
        for stream, consumer in topology.consumers(shards)
    ]
    return streams, consumers
