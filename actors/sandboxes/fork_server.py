"""What all processes have in common that start programs for an actor. Loads the standard library alone."""

import gc
import os
import select
import signal
import socket
from collections.abc import Callable


def control_socket() -> socket.socket:
    """Return the socket of the actor's on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt is for the actor, which ends this
    return socket.socket(fileno=os.dup(0))


def fork_for_each(
    control: socket.socket, packet_bytes: int, descriptors: int, run: Callable[[bytes, list[int]], int]
) -> None:
    """Have a process of its own `run` each packet that comes, with the descriptors on it; the process ends
    with what `run` returns. Return when the actor has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for these processes
    gc.freeze()  # what is loaded stays shared with them
    while True:
        packet, received, _, _ = socket.recv_fds(control, packet_bytes, descriptors)
        if not packet:
            return
        if os.fork() == 0:
            control.close()
            os._exit(run(packet, received))
        for descriptor in received:
            os.close(descriptor)


def ended_before(child: int, report: socket.socket | None, timeout_s: float | None) -> tuple[bool, bool]:
    """Wait until a child has ended or the actor has hung up, for so long at most. Return whether it has
    ended, and whether the actor has hung up."""
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    if report is not None:
        poll.register(report, select.POLLIN)
    ready = [descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]
    os.close(ended)
    return ended in ready, any(descriptor != ended for descriptor in ready)
