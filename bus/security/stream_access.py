"""How a role of a secured run reaches JetStream: by subjects that no other role can name.

A run has two accounts of nats-server: JetStream and all streams are in one, the users of the roles in the
other. What a role may ask of JetStream, or store, is imported into the account of the roles under a prefix
that holds a secret of that role. nats-server checks the subject that a client publishes on, but not the reply
subject that an answer goes to. In the account of the roles no stream listens, so that an answer reaches a
stream only under a prefix that whoever asked knows: its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from bus.security.credentials import Credentials
from bus.topology import Topology

MESSAGE_ID = "Nats-Msg-Id"
ID_END = "~"
"""Begins what is added to the id of a message."""
MULTIPLE_ANSWERS_S = 120
"""Seconds after its last message in which a secured bus forgets where an answer of several messages goes."""


@dataclass(frozen=True)
class StreamAccess:
    """The prefix of one role, and what makes the ids of its messages its own."""

    prefix: str
    stored: tuple[str, ...]
    """Beginnings of all subjects that JetStream hears."""
    heard: str
    """Beginning of the subjects of events, which processes listen to although they are stored."""
    id_key: bytes

    @classmethod
    def of(cls, credentials: Credentials) -> "StreamAccess":
        """Return the access of the role whose credentials these are."""
        topology, secret = Topology(credentials.run), credentials.stream_secret
        return cls(
            prefix=f"stored.{credentials.role}.{secret}.",
            stored=topology.stored_subjects(),
            heard=topology.subject("events", ""),
            id_key=blake2b(b"ids of stored messages", key=secret.encode(), digest_size=32).digest(),
        )

    def is_stored(self, subject: str) -> bool:
        """Return whether JetStream hears what is published on `subject`."""
        return subject.startswith(self.stored)

    def own_headers(self, headers: Mapping[str, str] | None) -> dict[str, str] | None:
        """Return the headers with an id that no other role can know.

        Whoever knew it could store another message under this id before, and the server would take this one
        for a duplicate. Processes of a role that publish the same message still give it the same id."""
        if headers is None or MESSAGE_ID not in headers:
            return None if headers is None else dict(headers)
        plain = headers[MESSAGE_ID]
        secret = blake2b(plain.encode(), key=self.id_key, digest_size=12).hexdigest()
        return {**headers, MESSAGE_ID: f"{plain}{ID_END}{secret}"}


def plain_id(headers: Mapping[str, str] | None) -> str:
    """Return the id that a message was published under; empty where it had none."""
    return (headers or {}).get(MESSAGE_ID, "").partition(ID_END)[0]


def has_several_answers(subject: str) -> bool:
    """Return whether JetStream may answer a request on `subject` with several messages."""
    pulls, reads = "$JS.API.CONSUMER.MSG.NEXT.", "$JS.API.DIRECT.GET."
    return subject.startswith(pulls) or (subject.startswith(reads) and subject.count(".") == reads.count("."))
