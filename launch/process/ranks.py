"""Tells what a rank learns from the agent that started it: its number and host. Loads no torch."""

import os
import signal

from bus.errors import WorldError
from bus.process.child_process import die_with_parent
from launch.process.runtime import RANK, SUPERVISOR

NODE_RANK = "SLUICE_NODE_RANK"
"""Environment variable that tells a rank which host of its world it is on."""
SMALLER_LEARNER = (
    "lower learner.batch.tokens_per_micro_batch, set learner.parallel.recompute=full and "
    "learner.optimizer.state_dtype=bfloat16"
)
"""Settings with which a learner takes less memory."""


def is_rank() -> bool:
    """Return whether torchrun, or an agent of ours, started this process as one of several."""
    return RANK in os.environ


def serves_probes() -> bool:
    """Return whether this process answers probes: of the ranks on a host only the first does."""
    return os.environ.get(RANK, "0") == "0"


def become_rank() -> None:
    """Make this process a rank of the world: it dies with the agent, and its number is by host. The agents
    number hosts by their addresses; a user who says --node-rank 0 wants rank 0 there."""
    if (ask_kernel := die_with_parent(signal.SIGKILL)) is not None:
        ask_kernel()
    if os.environ.get(SUPERVISOR, str(os.getppid())) != str(os.getppid()):
        raise WorldError("the agent that started this rank is gone")
    if NODE_RANK in os.environ:
        os.environ["RANK"] = str(
            int(os.environ[NODE_RANK]) * int(os.environ["LOCAL_WORLD_SIZE"]) + int(os.environ[RANK])
        )
