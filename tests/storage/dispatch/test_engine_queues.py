"""How many requests wait for room in an engine, by what actors say."""

from itertools import chain, repeat

from storage.dispatch.absent_actors import HEARD_S
from storage.dispatch.engine_queues import EngineQueues
from storage.metrics.records import ENDED


def row(actor: str, queued: int) -> dict[str, object]:
    return {"source": actor, "time_s": 0.0, "engine/busy_s": 1.0, "engine/queued": queued}


def test_the_newest_counts_of_all_actors_add_up_until_they_end():
    queues = EngineQueues()
    for actor, queued in (("a", 3), ("b", 5), ("a", 4)):
        queues.write(row(actor, queued))
    queues.write({"source": "learner", "time_s": 0.0, "train/step": 1})
    assert queues.requests == 9
    queues.write({"source": "b", "time_s": 0.0, ENDED: "stopped"})
    assert queues.requests == 4


def test_actors_that_are_not_heard_of_any_more_do_not_count():
    clock = chain([0.0, 1.0 + HEARD_S], repeat(2.0 + HEARD_S))
    queues = EngineQueues(clock=lambda: next(clock))
    queues.write(row("gone", 3))
    queues.write(row("there", 5))
    assert queues.requests == 5
