"""Has a run go on with the commit of a hub's model that it began with, whatever the hub has by now."""

import re
from pathlib import Path

import structlog

from bus.errors import LostDataError
from launch.model_files.hub_model import fetched_before, is_hub_name, newest_commit, with_commit
from storage.disk.atomic_files import one_at_a_time, read_json, write_json
from storage.disk.run_directory import RunDirectory

log = structlog.get_logger()
COMMIT = re.compile(r"[0-9a-f]{40}")
REMEDY = "remove it: the run then takes what the hub has now"


def pinned(path: Path, run: RunDirectory) -> Path:
    """Return the name of a hub's model with the commit that the run noted for it; other paths as they are."""
    if not is_hub_name(path) or (commit := _noted(path, run)) is None:
        return path
    return with_commit(path, commit)


def pin(path: Path, run: RunDirectory) -> Path:
    """Return what `pinned` does; at the first start of a run, note which commit that is. A hub that cannot be
    reached is no error: the commit is then that of the files on this host, if there are some. A name that has
    got another commit since is logged."""
    if not is_hub_name(path) or COMMIT.fullmatch(str(path).partition("@")[2]):
        return path
    newest = newest_commit(path)
    with one_at_a_time(run.model_commit):  # each rank of a learner comes here
        commit = _noted(path, run)
        if commit is None:
            here = fetched_before(path) if newest is None else None
            commit = newest if here is None else here.name
            if commit is None or not COMMIT.fullmatch(commit):
                return path  # whoever needs the files says that they are not to be had
            write_json(run.model_commit, {"model": str(path), "commit": commit})
            log.info("model_pinned", model=str(path), commit=commit, noted_in=str(run.model_commit))
        elif newest not in (None, commit):
            log.warning(
                "model_has_changed",
                model=str(path),
                goes_on_with=commit,
                the_hub_has=newest,
                remedy="a new run takes the new one",
            )
    return with_commit(path, commit)


def _noted(path: Path, run: RunDirectory) -> str | None:
    """Return the commit that the run noted for this name; None for none, or another name's."""
    try:
        noted = read_json(run.model_commit, REMEDY)
    except FileNotFoundError:
        return None
    if not isinstance(noted, dict) or not {"model", "commit"} <= noted.keys():
        raise LostDataError(f"{run.model_commit} is no note of a model's commit: {REMEDY}")
    return str(noted["commit"]) if noted["model"] == str(path) else None
