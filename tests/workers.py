"""Runs the tests in processes that are forked when all is imported and collected: `pytest --workers 4`.

Workers of pytest-xdist import and collect everything once more each, a tenth of the default suite's time.
"""

import atexit
import os
from itertools import groupby
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import pytest

FORK = get_context("fork")
INDEX_BYTES = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="processes that run the tests, file by file")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    """Run the tests in `--workers` processes. Without, or for a single file, pytest's own loop does."""
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    options = session.config.option
    workers = min(options.workers, len(files))
    if workers < 2 or session.testsfailed or options.collectonly:
        return None
    session.config._tmp_path_factory.getbasetemp()  # each worker gets a folder of its own in it
    running = {}
    indices, writing = os.pipe()
    with os.fdopen(writing, "wb") as queue:
        queue.writelines(index.to_bytes(INDEX_BYTES, "big") for index in range(len(files)))
    try:
        for number in range(workers):
            here, there = FORK.Pipe(duplex=False)
            process = FORK.Process(target=run_files, args=(session, files, indices, there, number))
            process.start()
            there.close()
            running[here] = process
        follow(session, running)
    finally:
        for process in running.values():
            process.kill()
    return True


def follow(session: pytest.Session, running: dict[Connection, BaseProcess]) -> None:
    """Take the workers' reports until all have ended. A worker that dies fails the test that it ran."""
    hook = session.config.hook
    began: dict[Connection, tuple[str, tuple[str, int | None, str]]] = {}
    done: set[Connection] = set()
    while running:
        for connection in wait(list(running)):
            assert isinstance(connection, Connection)
            try:
                message = connection.recv()
            except EOFError:
                process = running.pop(connection)
                process.join()
                if process.exitcode == 0 and connection in done:
                    continue
                nodeid, location = began.get(connection, ("tests", ("tests", 0, "the start of a worker")))
                words = f"the worker died, exit status {process.exitcode}: the rest of this file did not run"
                report = pytest.TestReport(nodeid, location, {}, "failed", words, "call")
            else:
                if message is None:
                    done.add(connection)
                    continue
                if isinstance(message, tuple):
                    began[connection] = message
                    continue
                report = hook.pytest_report_from_serializable(config=session.config, data=message)
            hook.pytest_runtest_logreport(report=report)
            if report.when != "setup" or not report.passed:
                hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)


class Reports:
    """Sends reports to the process that prints them."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection
        self._all = config.option.durations is not None

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._connection.send((nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call" and not self._all:
            return  # nobody is shown that a test was set up and torn down
        self._connection.send(
            self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )


def run_files(
    session: pytest.Session, files: list[list[pytest.Item]], indices: int, connection: Connection, number: int
) -> None:
    """Run files whose indices come from the pipe `indices`, which all workers read, until it is empty."""
    config = session.config
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(Reports(config, connection))
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are shared with the other workers
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folder = config._tmp_path_factory.getbasetemp() / f"worker-{number}"
    folder.mkdir(mode=0o700)
    config._tmp_path_factory._basetemp = folder
    while taken := os.read(indices, INDEX_BYTES):
        items = files[int.from_bytes(taken, "big")]
        # After a file's last test all is torn down but what belongs to the session.
        for item, following in zip(items, [*items[1:], session], strict=True):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    session._setupstate.teardown_exact(None)
    atexit._run_exitfuncs()  # a forked process ends without them
    connection.send(None)  # an exit status of 0 alone may be that of a test which ended its process
