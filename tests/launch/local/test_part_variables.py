"""Variables of the environment that `launch local` gives its processes."""

from launch.local.local import _run_parts
from launch.settings.run_config import resolve
from storage.disk.run_directory import RunDirectory

POLICY = "OMP_WAIT_POLICY"


def given(tmp_path, **settings):
    config = resolve({"data": {"task": "sort"}, **settings})
    return {
        part.name: part.environment.get(POLICY) for part in _run_parts(config, RunDirectory(tmp_path, "run"))
    }


def test_threads_of_learner_and_embedded_engine_do_not_spin_on_the_cores_they_share(tmp_path, monkeypatch):
    monkeypatch.delenv(POLICY, raising=False)
    embedded = {"actors": {"engine": {"type": "embedded"}}}
    assert set(given(tmp_path, **embedded).values()) == {"PASSIVE"}
    own = {"supervision": {"environment": {"learner": {POLICY: "ACTIVE"}}}}
    assert given(tmp_path, **embedded, **own) == {
        "storage": "PASSIVE",
        "actors": "PASSIVE",
        "learner": "ACTIVE",
    }
    sglang = {"actors": {"engine": {"type": "sglang"}}}
    assert set(given(tmp_path, **sglang).values()) == {None}
    monkeypatch.setenv(POLICY, "ACTIVE")  # which they inherit
    assert set(given(tmp_path, **embedded).values()) == {None}
