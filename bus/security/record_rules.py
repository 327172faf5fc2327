"""Which role of a run may write each record that others act on, and in which order its versions are taken."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

ROLE_KEYS = "keys"
"""Key of the bus with the list of the roles' keys, which the run's own key alone signs."""
MOST_NAMES = 4096
"""Names whose rules are remembered."""
Order = Literal["newest", "next", "any"]


@dataclass(frozen=True)
class RecordRule:
    """Who may write a record besides the operator, and in which order its versions are taken."""

    writers: tuple[str, ...]
    order: Order
    """`newest`: none that is older than the newest seen, unless it says the same. `next`: each only once.
    `any`: as they come, where acting on one twice does no harm."""


_STORAGE, _LEARNER = RecordRule(("storage",), "newest"), RecordRule(("learner",), "newest")
_ASKED_BY_LEARNER = RecordRule(("learner",), "next")
RULES: dict[str, RecordRule] = {
    "run": _STORAGE,
    "identity": _STORAGE,
    "heldout": _STORAGE,
    "heldout.*": _STORAGE,
    "pace": _STORAGE,
    "policy": _LEARNER,
    "device": _LEARNER,
    "device-users.*": RecordRule(("actor", "learner"), "newest"),
    "engine-nodes.*": RecordRule(("actor",), "newest"),
    "role.dispatcher": _STORAGE,
    "role.shard-*": _STORAGE,
    "role.learner*": _LEARNER,
    "role.engine.*": RecordRule(("actor",), "newest"),
    "tasks.evaluation": RecordRule(("learner",), "any"),
    "notice.stored": RecordRule(("storage",), "any"),
    "broadcast.offer": RecordRule(("learner",), "any"),
    "rpc.batch": _ASKED_BY_LEARNER,
    "rpc.committed": _ASKED_BY_LEARNER,
    "rpc.unreadable": _ASKED_BY_LEARNER,
    "rpc.resumed": _ASKED_BY_LEARNER,
    "rpc.close.*": RecordRule(("storage",), "next"),
    "rpc.data": RecordRule((), "next"),
    "rpc.engines.*": RecordRule((), "next"),
    "rpc.profile": RecordRule((), "next"),
}
"""Rules by name: that of a key, or of a subject without the run. The operator alone writes other keys."""
NOTICES = {"notice.policy": "policy", "notice.pace": "pace", "notice.device": "device"}
"""Subjects of notices, with the key whose record they bring."""
_OPERATOR_ALONE = RecordRule((), "newest")


@lru_cache(MOST_NAMES)
def rule_of(record: str) -> RecordRule:
    found = (rule for pattern, rule in RULES.items() if fnmatchcase(record, pattern))
    return next(found, _OPERATOR_ALONE)


@lru_cache(MOST_NAMES)
def record_of(name: str) -> str | None:
    """Return the record that a subject, given without the run, brings; None where it brings no signed one."""
    if name in NOTICES:
        return NOTICES[name]
    is_subject = name.startswith(("tasks.", "notice.", "rpc.", "broadcast."))
    return name if is_subject and rule_of(name) is not _OPERATOR_ALONE else None
