"""A run in exact arithmetic, from commands in directories of their own that share nothing but a secured bus.

Each process has the credentials of its role.

Its shards are processes of their own, one of which is killed; its actors have two engines each, and some of
them get the weights from others.
"""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bus.security.credentials import load_credentials
from bus.security.permissions import ROLES
from bus.server.nats_server import free_port
from learner.backends.factory import close_world, init_world
from learner.backends.megatron.trainer import Trainer
from learner.backends.model_loading import load_hf_directory
from learner.checkpoint.commit import load_checkpoint
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import Sample, pack
from storage.disk.checkpoints import latest as latest_checkpoint
from storage.store.replay import ReplayStore
from tests.e2e.commands import SMALL, Command, wait_until, with_steps

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(600)]
STEPS, GROUPS, SAMPLES = 8, 4, 4
RUN = "apart"
SETTINGS = (
    *with_steps(SMALL, STEPS), "--replay.shards", "4",
    "--actors.fleet.engines", "2", "--actors.mask-older-versions", "1",
    "--learner.publication.transport.type", "http", "--learner.publication.snapshot-every", "2",
    "--model.numerics", "exact",
    "--learner.entropy-coef", "0.1",  # so that every step moves the weights, whatever the rewards are
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """The directories of a run that has ended; a shards process was killed on the way."""
    root = tmp_path_factory.mktemp("hosts")
    port, keys = free_port("127.0.0.1"), root / "keys"
    bus = Command(root / "bus", "bus", "--port", str(port), "--secure", str(keys), "--run", RUN)
    started = [bus]

    def start(host: str, command: str, role: str, *arguments: str) -> Command:
        join = ("--creds", str(keys / RUN / f"{role}.creds"), "--run", RUN)
        started.append(Command(root / host, command, *join, *arguments))
        return started[-1]

    try:
        wait_until(lambda: "bus_ready" in bus.said(), "the bus", bus)
        storage = start("storage", "storage", "storage", *SETTINGS, "--replay.here", "none")
        first = start("first", "shards", "storage", "--shards", "0-1")
        second = start("second", "shards", "storage", "--shards", "2-3", "--directory", "elsewhere")
        learner = start("learner", "learner", "learner")
        near = start("near", "actors", "actor")
        far = start("far", "actors", "actor")
        watching = start("watch", "watch", "watcher")
        recorded = root / f"learner/runs/{RUN}/learner.json"
        wait_until(recorded.exists, "the settings of the learner that has the role", learner)
        shutil.copy(recorded, root / "before.json")
        own = ("--directory", str(root / "learner/runs"), "--learner.optimizer.lr", "0.5")
        rival = start("rival", "learner", "learner", *own)
        wait_until(lambda: _stored(root) >= 2 * GROUPS, "two steps' groups", learner, timeout_s=120)
        second.kill()
        again = start("second", "shards", "storage", "--shards", "2-3", "--directory", "elsewhere")
        wait_until(lambda: again.said().count("shards_ready") == 2, "the shards that were killed", again)
        wait_until(lambda: _stored(root) >= 4 * GROUPS, "four steps' groups", learner, timeout_s=120)
        assert start("thief", "shards", "storage", "--shards", "3").wait(180) == 2
        assert rival.wait(180) == 2, rival.said()
        assert f"process {learner.process.pid} on " in rival.said()
        assert learner.wait(240) == 0, learner.said()
        for follower in (near, far, watching):
            assert follower.wait(120) == 0, follower.said()  # they hear that the run is done
        wait_until((root / f"storage/runs/{RUN}/summary.json").exists, "the summary", storage)
        for service in (first, again, storage, bus):
            assert service.stop() == 0, service.said()
        yield root
    finally:
        for command in started:
            command.kill()


def _stored(root: Path) -> int:
    """Groups that the ledger knows to be complete."""
    path = root / f"storage/runs/{RUN}/ledger.sqlite"
    if not path.exists():
        return 0
    with closing(sqlite3.connect(path, timeout=10)) as ledger:
        if not ledger.execute("SELECT 1 FROM sqlite_master WHERE name = 'leases'").fetchone():
            return 0
        question = "SELECT count(*) FROM leases WHERE state NOT IN ('issued', 'rejected')"
        return int(ledger.execute(question).fetchone()[0])


def test_each_host_keeps_only_what_is_its_own(finished: Path):
    found = {host.name: {p.name for p in (host / f"runs/{RUN}").glob("*")} for host in finished.iterdir()}
    assert {"checkpoints", "export", "model", "progress.json"} <= found["learner"]
    assert {"ledger.sqlite", "data"} <= found["storage"]
    own = {"account", "seen-actors.json"}  # what it sent, and which signed records it took
    assert found["near"] <= own
    assert found["far"] <= own
    assert not found["learner"] & {"ledger.sqlite", "replay"}


def test_nothing_is_lost_and_every_group_trained_on_once(finished: Path):
    progress = json.loads((finished / f"learner/runs/{RUN}/progress.json").read_text())
    with closing(sqlite3.connect(finished / f"storage/runs/{RUN}/ledger.sqlite")) as ledger:
        groups = dict(ledger.execute("SELECT state, count(*) FROM leases GROUP BY state"))
        known = {lease for (lease,) in ledger.execute("SELECT lease_id FROM leases WHERE state != 'issued'")}
        counts = {uses for (uses,) in ledger.execute("SELECT count(*) FROM uses GROUP BY lease_id")}
    assert progress["step"] == STEPS
    assert progress["trajectories_trained"] == STEPS * GROUPS * SAMPLES
    assert progress["max_staleness_seen"] <= 2
    assert groups.pop("committed") == STEPS * GROUPS
    assert set(groups) <= {"stored", "issued"}
    assert counts == {1}
    assert known <= set(_complete(finished))


def test_each_shard_lies_where_its_process_was_told_to(finished: Path):
    for replay, shards in (
        (f"first/runs/{RUN}/replay", {"shard_00", "shard_01"}),
        (f"second/elsewhere/{RUN}/replay", {"shard_02", "shard_03"}),
    ):
        assert {path.name for path in (finished / replay).iterdir()} == shards
    assert not (finished / f"storage/runs/{RUN}/replay").exists()
    for lease_id, shard in _complete(finished).items():
        assert lease_id % 4 == shard


def _complete(root: Path) -> dict[int, int]:
    """Complete groups on disk, and in which shard."""
    found: dict[int, int] = {}
    for host in (f"first/runs/{RUN}", f"second/elsewhere/{RUN}"):
        for directory in (root / host / "replay").iterdir():
            with closing(ReplayStore.open(directory, writable=False)) as store:
                found |= dict.fromkeys(store.completed, int(directory.name[-2:]))
    return found


def test_second_writer_is_refused_with_the_first_ones_name(finished: Path):
    said = (finished / "thief/shards.out").read_text()
    assert f"launch: run '{RUN}' already has a shard-3: process " in said
    assert "Traceback" not in said


def test_second_learner_is_refused_while_the_first_goes_on(finished: Path):
    said = (finished / "rival/learner.out").read_text()
    assert f"launch: run '{RUN}' already has a learner: process " in said
    assert "Traceback" not in said
    recorded = finished / f"learner/runs/{RUN}/learner.json"
    assert recorded.read_text() == (finished / "before.json").read_text()


def test_roles_suffice_for_all_that_a_run_does_and_for_who_watches_it(finished: Path):
    run = finished / f"storage/runs/{RUN}"
    assert f"done, step {STEPS} of {STEPS}" in (finished / "watch/watch.out").read_text()
    rows = _lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows if row.get("train/stage") == "rl"] == list(range(1, STEPS + 1))
    assert len({row["event"] for row in rows}) == len(rows)
    assert any(row["kind"] == "evaluation" for row in rows)
    assert "engine/busy_s" in (run / "counters.jsonl").read_text()
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS
    assert (run / "curves.png").exists()
    said = [path.read_text(errors="replace") for path in finished.glob("*/*.out")]
    assert not [text for text in said if "permissions violation" in text.lower()], said


def test_no_secret_key_is_written_elsewhere_than_in_its_file(finished: Path):
    keys = finished / "keys"
    seeds = [load_credentials(path).seed for path in keys.glob(f"{RUN}/*.creds")]
    written = [path for path in finished.rglob("*") if path.is_file() and keys not in path.parents]
    assert len(seeds) == len(ROLES)
    assert [path for path in written if any(seed.encode() in path.read_bytes() for seed in seeds)] == []


def test_the_log_probs_of_engines_are_exactly_those_of_the_learner(finished: Path):
    run = finished / f"storage/runs/{RUN}"
    steps = [row for row in _lines(run / "metrics.jsonl") if row.get("train/stage") == "rl"]
    assert min(step["train/grad_norm"] for step in steps) > 0
    mismatches = {step["policy/mismatch_nats"] for step in steps if "policy/mismatch_nats" in step}
    assert mismatches == {0.0}
    counted = _lines(run / "counters.jsonl")
    assert {row["engine/probe_nats"] for row in counted if "engine/probe_nats" in row} == {0.0}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_held_out_accuracy_was_measured_for_the_first_the_warm_and_the_last_version(finished: Path):
    progress = json.loads((finished / f"learner/runs/{RUN}/progress.json").read_text())
    assert {"0", "1", str(1 + STEPS)} <= set(progress["evaluations"])


def test_both_engines_of_all_actors_take_part_and_none_is_lost(finished: Path):
    for host in ("near", "far"):
        said = (finished / host / "actors.out").read_text()
        assert "engine=engine-0" in said
        assert "engine=engine-1" in said
        assert "engine_lost" not in said


def test_actors_follow_the_policy_without_a_failure(finished: Path):
    near, far = ((finished / host / "actors.out").read_text() for host in ("near", "far"))
    assert "weights_not_fetched" not in near + far
    assert list((finished / f"learner/runs/{RUN}/weights").glob("*.snapshot.*.blob"))


@pytest.fixture
def world() -> Iterator[None]:
    """A world of this one process, unless tests of the learner made one in it before."""
    if torch.distributed.is_initialized():
        yield
        return
    init_world()
    yield
    close_world()


@pytest.mark.usefixtures("world")
def test_export_answers_greedily_as_the_trainer_does(finished: Path):
    run = finished / f"learner/runs/{RUN}"
    model = AutoModelForCausalLM.from_pretrained(run / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    hf_config, initial = load_hf_directory(run / "model")
    trainer = Trainer(hf_config, initial, OptimizerConfig())
    load_checkpoint(trainer, latest_checkpoint(run / "checkpoints"))
    chats = [[{"role": "user", "content": f"sort {n:06d}"}] for n in (918273, 5, 774411)]
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        answer = model.generate(
            torch.tensor([prompt]), max_new_tokens=7, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )[0].tolist()
        assert _greedy(trainer, answer)[len(prompt) - 1 : -1] == answer[len(prompt) :]


def _greedy(trainer: Trainer, tokens: list[int]) -> list[int]:
    """The likeliest next token after each prefix, by the Megatron model."""
    length = len(tokens)
    sample = Sample(
        token_ids=torch.tensor(tokens, dtype=torch.int32).numpy(),
        loss_mask=torch.ones(length, dtype=torch.bool).numpy(),
        streams={},
    )
    [batch] = pack([sample], length)
    with torch.no_grad():
        return trainer.model.logits(batch).argmax(-1).tolist()
