"""Records that an enemy forges."""

import random
from collections.abc import Callable

from bus.codec import decode, encode
from bus.security.role_keys import new_seed, public_key
from bus.security.signatures import Signatures, SignedRecord

By = Callable[..., Signatures]


def forgeries(
    newest: bytes, old: bytes, by: By, record: str = "policy"
) -> list[Callable[[random.Random], bytes]]:
    """Return ways to make a record that nobody who may write it has signed, or that is an old one."""
    signed = decode(newest, SignedRecord)
    others = [by(role) for role in ("storage", "actor", "judge", "watcher")]
    strangers = [by("learner", "other"), by("operator", "other")]
    learner = by("learner")

    def changed(**fields: object) -> bytes:
        parts = {name: getattr(signed, name) for name in ("key", "sequence", "content", "signature")}
        return encode(SignedRecord(**{**parts, **fields}))

    def flipped(draw: random.Random) -> bytes:
        data = bytearray(newest)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(data)

    return [
        lambda _: old,
        flipped,
        lambda draw: newest[: draw.randrange(len(newest))],
        lambda draw: draw.randbytes(draw.randrange(400)),
        lambda draw: newest + draw.randbytes(1 + draw.randrange(20)),
        lambda draw: draw.choice(others).sealed(record, draw.randbytes(20)),
        lambda draw: draw.choice(strangers).sealed(record, draw.randbytes(20)),
        lambda draw: learner.sealed(draw.choice(["run", "role.learner", "device", ""]), draw.randbytes(20)),
        lambda draw: changed(content=draw.randbytes(20)),
        lambda draw: changed(sequence=signed.sequence + draw.randrange(1, 1 << 30), content=b"later"),
        lambda draw: changed(sequence=draw.randrange(-(1 << 63), 1 << 63), content=b"another time"),
        lambda draw: changed(signature=draw.randbytes(draw.choice([0, 63, 64, 65])), content=b"x"),
        lambda draw: changed(key=public_key(new_seed()), content=draw.randbytes(8)),
        lambda draw: changed(key=draw.choice(["", "U", "=" * 56, draw.randbytes(20).hex()]), content=b"x"),
        lambda draw: changed(key=others[0]._key, content=draw.randbytes(8)),
    ]
