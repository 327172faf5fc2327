"""Division of the world of a process: it outlives a test, since the next one often wants the same."""

import gc

from learner.backends.megatron.core import process_groups
from learner.backends.megatron.core.megatron_core import parallel_state
from learner.config.parallel import ParallelConfig

_present: tuple[ParallelConfig, list] | None = None
"""The last division, and the list of its groups, which megatron-core replaces when somebody else divides."""


def divide_world(parallel: ParallelConfig) -> None:
    """Make megatron-core's process groups, unless those that there are will do. Every rank calls this.

    A trainer of an earlier test is garbage in a cycle, and holds its groups: each has a thread that wakes a
    hundred times a second. So garbage goes first."""
    global _present
    if _present is not None and _present[0] == parallel and _present[1] is groups():
        return
    gc.collect()
    process_groups.divide_world(parallel)
    _present = parallel, groups()


def groups() -> list | None:
    return parallel_state._global_process_group_list
