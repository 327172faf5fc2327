"""A Python session that keeps its variables, as one file that is carried into a sandbox and run there.

    python -S session.py < CODE

The first run begins a process that stays; each run hands its code and its output to that process, and ends
with it. A run that is ended interrupts its code. Loads the standard library alone."""

import array
import ast
import linecache
import os
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path

PLACE = str(Path(__file__).with_name("session"))
GRACE_S = 2.0
"""Time that interrupted code has to end; then the session ends with it."""
FAILED, LOST = 1, 70


def main() -> int:
    """Have the session run the code of the standard input; return its status."""
    code = sys.stdin.buffer.read()
    connection = _connected()
    descriptors = array.array("i", [1, 2])
    connection.sendmsg([b"c"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    connection.sendall(code)
    connection.shutdown(socket.SHUT_WR)
    status = connection.recv(1)
    if not status:
        os.write(2, b"[the session has ended: its variables are gone]\n")
    return status[0] if status else LOST


def _connected() -> socket.socket:
    """Connect to the session, which is begun where there is none."""
    connection = socket.socket(socket.AF_UNIX)
    if connection.connect_ex(PLACE) != 0:
        if Path(PLACE).exists():
            os.write(2, b"[a new session has begun: earlier variables are gone]\n")
            Path(PLACE).unlink()
        _begin()
        connection.connect(PLACE)
    return connection


def _begin() -> None:
    """Start the process that stays, which has all packages, where this one goes without."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(PLACE)
    listening.listen(64)
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for place in range(3):
            os.dup2(null, place)
        os.set_inheritable(listening.fileno(), True)
        os.execv(sys.executable, [sys.executable, __file__, str(listening.fileno())])
    listening.close()


class Session:
    """Runs requests, one after the other."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._names: dict[str, object] = {"__name__": "__main__"}
        self._count = 0
        self._null = os.open(os.devnull, os.O_RDWR)
        self._may_interrupt = False
        sys.argv[:] = [""]
        sys.path[0] = ""
        signal.signal(signal.SIGINT, self._interrupt)

    def serve(self) -> None:
        """Run code until the sandbox ends."""
        while True:
            connection, _ = self._listening.accept()
            with connection, suppress(KeyboardInterrupt, ConnectionError):  # interrupted late, or left
                self._serve(connection)

    def _interrupt(self, *_: object) -> None:
        """Interrupt code alone: elsewhere, what a call has sent or waits for would be lost."""
        if self._may_interrupt:
            self._may_interrupt = False
            raise KeyboardInterrupt

    def _serve(self, connection: socket.socket) -> None:
        _, given, _, _ = socket.recv_fds(connection, 1, 2)
        if len(given) < 2:  # the run that connected was ended before it sent them
            return
        code = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode(errors="replace")
        for place, descriptor in zip((1, 2), given, strict=True):
            os.dup2(descriptor, place)
            os.close(descriptor)
        over = threading.Event()
        watching = threading.Thread(target=_interrupt_if_left, args=(connection, over), daemon=True)
        watching.start()
        try:
            status = self._run(code)
        finally:
            over.set()
        _flush()
        for place in (1, 2):
            os.dup2(self._null, place)
        _flush()  # what nobody reads any more is not the output of the next call
        with suppress(OSError):
            connection.send(bytes([status]))

    def _run(self, code: str) -> int:
        self._count += 1
        name = f"<call {self._count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        try:
            self._may_interrupt = True
            self._execute(code, name)
            _show_pictures()
            status = 0
        except SystemExit as asked:
            status = asked.code & 0xFF if isinstance(asked.code, int) else int(asked.code is not None)
        # code may raise anything: it is told as Python's own interpreter tells it
        except BaseException as error:  # noqa: BLE001
            status = FAILED
            shown = error.__traceback__
            while shown is not None and not shown.tb_frame.f_code.co_filename.startswith("<call "):
                shown = shown.tb_next
            with suppress(OSError, ValueError):  # nobody may read the answer any more
                traceback.print_exception(type(error), error, shown)
        self._may_interrupt = False
        return status

    def _execute(self, code: str, name: str) -> None:
        """Run statements, and print the value of the last one if it is an expression."""
        parsed = ast.parse(code, name)
        last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
        exec(compile(parsed, name, "exec"), self._names)  # what this process is for
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), self._names)
            if value is not None:
                self._names["_"] = value
                print(repr(value))  # noqa: T201  # as an interpreter does


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _show_pictures() -> None:
    """Write open figures of matplotlib to files, and say where they are."""
    if (plots := sys.modules.get("matplotlib.pyplot")) is None:
        return
    for number in plots.get_fignums():
        path = next(f"figure-{n}.png" for n in range(1, 1 << 20) if not Path(f"figure-{n}.png").exists())
        plots.figure(number).savefig(path)
        plots.close(number)
        print(f"[figure: {path}]")  # noqa: T201


def _interrupt_if_left(connection: socket.socket, over: threading.Event) -> None:
    """Interrupt the code when the run that waits for it is gone."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # hang-ups alone
    while not over.is_set():
        if poll.poll(200) and not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            if not over.wait(GRACE_S):
                os._exit(LOST)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Session(socket.socket(fileno=int(sys.argv[1]))).serve()
    sys.exit(main())
