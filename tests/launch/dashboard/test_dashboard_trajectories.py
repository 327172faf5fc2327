"""The trajectory browser's list and tokens, from stores on disk and from shards over the bus."""

import asyncio
import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import launch
from bus.codec import encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import ConfigError
from bus.messages import RunRecord
from bus.server.nats_server import NatsServer
from bus.streams.blob_store import put_only_blob
from bus.streams.publish import Publisher
from launch.dashboard.open_runs import OpenRuns
from launch.dashboard.trajectories import one_group, one_trajectory, trajectory_list
from launch.settings.run_config import RunConfig, validate
from launch.trajectories.export import export_run
from launch.trajectories.search import TrajectoryFilter
from launch.trajectories.sources import BusTrajectories, StoredTrajectories
from launch.trajectories.token_texts import decoder, token_texts
from launch.trajectories.training import importance_ratios
from learner.metrics import trained_facts
from learner.metrics.trained_facts import TrainedFacts
from learner.metrics.trained_logprobs import TrainedLogprobs
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger import Ledger
from storage.model_files.packed_files import bundle
from storage.store.replay import ReplayStore
from tests.launch.dashboard.run_on_disk import (
    GROUPS_A_STEP,
    SAMPLES,
    WORDS,
    logprobs_of,
    make_run,
    two_turns,
    write_tokenizer,
)
from tests.launch.dashboard.served_page import no_bus
from tests.storage.serving import make_shard, manifest, running


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run whose last three steps trained on leases 0 to 11."""
    return make_run(tmp_path_factory.mktemp("runs"), "done", steps=5)


async def names(run: RunDirectory, **wanted: object) -> list[str]:
    found = await trajectory_list(StoredTrajectories(run), TrajectoryFilter(**wanted))
    return [one["id"] for one in found["trajectories"]]


async def test_the_newest_come_first_and_filters_choose(stored: RunDirectory):
    every = await names(stored)
    assert len(every) == 3 * GROUPS_A_STEP * SAMPLES
    assert (every[0], every[-1]) == ("g00000011.0", "g00000000.1")
    assert await names(stored, step=4) == [f"g0000000{n}.{m}" for n in (7, 6, 5, 4) for m in (0, 1)]
    assert await names(stored, step=4, least_reward=0.5) == [f"g0000000{n}.1" for n in (7, 6, 5, 4)]
    assert await names(stored, most_reward=0.0, below=2) == ["g00000001.0", "g00000000.0"]
    assert await names(stored, end="timeout") == []
    assert {name[:9] for name in await names(stored, version=3)} == {f"g0000000{n}" for n in range(4)}
    assert await names(stored, task="task-3") == ["g00000003.0", "g00000003.1"]
    assert await names(stored, task="None") == []
    assert await names(stored, lease=3, least_reward=1) == ["g00000003.1"]
    assert len(await names(stored, version=4)) == 2 * GROUPS_A_STEP * SAMPLES  # sampled one turn of each


def test_a_reward_that_is_due_is_neither_large_nor_small():
    due = two_turns(0, 0, 1, reward_due=True)
    assert TrajectoryFilter().matches(due)
    assert not TrajectoryFilter(least_reward=0.0).matches(due)
    assert not TrajectoryFilter(most_reward=0.0).matches(due)


async def test_text_is_found_in_prompts_and_answers_whatever_its_case(tmp_path: Path):
    run = make_run(tmp_path, "texts", steps=3)
    other = two_turns(99, 0, 3, group_size=1)
    ids = other.token_ids.copy()
    ids[8] = 77
    with closing(ReplayStore.open(run.replay(1))) as store:
        store.append([replace(other, token_ids=ids, metadata={"source": "gsm8k"})])
    assert await names(run, text="W77") == ["g00000099.0"]
    assert await names(run, source="gsm8k") == ["g00000099.0"]
    assert await names(run, source="aime") == []
    assert len(await names(run, text="SORT 4")) == 25  # the prompt of all
    assert await names(run, text="no such words") == []
    assert await names(run, text="w77", least_reward=0.5) == []


async def test_a_search_that_takes_long_stops_and_says_where(stored: RunDirectory, monkeypatch):
    monkeypatch.setattr("launch.dashboard.trajectories.LONGEST_SEARCH_S", -1.0)
    found = await trajectory_list(StoredTrajectories(stored), TrajectoryFilter(text="no such words"))
    assert (found["trajectories"], found["searched"], found["below"]) == ([], 4, 8)
    found = await trajectory_list(StoredTrajectories(stored), TrajectoryFilter(text="no such words", below=4))
    assert (found["searched"], found["below"]) == (4, None)


async def test_a_long_list_goes_on_where_it_ended(stored: RunDirectory, monkeypatch):
    monkeypatch.setattr("launch.dashboard.trajectories.SEARCHED", 4)
    source, wanted, seen = StoredTrajectories(stored), TrajectoryFilter(), []
    while True:
        found = await trajectory_list(source, wanted)
        seen += [one["id"] for one in found["trajectories"]]
        if found["below"] is None:
            break
        wanted = TrajectoryFilter(below=found["below"])
    assert seen == [f"g{n:08}.{m}" for n in range(11, -1, -1) for m in (0, 1)]


def count_openings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the stores' directories, in the order in which they are opened from now on."""
    opened: list[str] = []
    opening = ReplayStore.open

    def counted(directory: Path, *, writable: bool = True) -> ReplayStore:
        opened.append(directory.name)
        return opening(directory, writable=writable)

    monkeypatch.setattr(ReplayStore, "open", counted)
    return opened


async def test_a_search_opens_each_store_once(stored: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    opened = count_openings(monkeypatch)
    assert len(await names(stored, end="completed")) == 3 * GROUPS_A_STEP * SAMPLES
    assert opened == ["shard_00", "shard_01"]


async def test_who_follows_a_run_holds_its_stores_open_once(
    stored: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    opened, closed = count_openings(monkeypatch), []
    closing_one = ReplayStore.close
    monkeypatch.setattr(ReplayStore, "close", lambda store: (closed.append(store), closing_one(store)))
    async with StoredTrajectories(stored).groups() as groups:
        for _ in range(3):
            leases = await groups.leases()
            [group] = await groups.read(leases[-1:])
            assert (len(opened) - len(closed), len(leases)) == (2, 3 * GROUPS_A_STEP)
    assert len(closed) == len(opened) == 6
    assert group[0].token_ids.tolist() == two_turns(11, 0, 5).token_ids.tolist()  # it stays readable


async def test_a_damaged_store_is_opened_once_more_and_its_groups_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, opened = make_run(tmp_path, "damaged", steps=3), count_openings(monkeypatch)
    for segment in run.replay(0).glob("*/group.zip"):
        content = bytearray(segment.read_bytes())
        content[content.index(two_turns(0, 0, 0).token_ids.tobytes()[4:40])] ^= 1
        segment.write_bytes(content)
    assert {name[:9] for name in await names(run)} == {f"g{n:08}" for n in range(1, 12, 2)}
    assert opened == 2 * ["shard_00", "shard_01"]
    listed = await trajectory_list(StoredTrajectories(run), TrajectoryFilter(below=3))
    assert re.fullmatch(
        "2 groups are left out, first that of lease 2: .* is corrupt: .*", str(listed["left_out"])
    )
    with structlog.testing.capture_logs() as logs:
        rows = await export_run(
            StoredTrajectories(run), TrajectoryFilter(), tmp_path / "x.jsonl", asyncio.Event()
        )
        assert len([*launch.attach(run.name, directory=tmp_path).trajectories()]) == rows == 6 * SAMPLES
    told = [(one["event"], one["reason"].partition(": ")[0]) for one in logs if one["log_level"] == "warning"]
    why = "6 groups are left out, first that of lease 0"
    assert told == [("export_incomplete", why), ("trajectories_incomplete", why)]


async def test_what_appears_after_a_first_look_is_found(tmp_path: Path):
    runs = OpenRuns(tmp_path, no_bus)
    with pytest.raises(ConfigError, match="nobody knows the bus of fresh"):
        await trajectory_list(runs.trajectories("fresh"), TrajectoryFilter())
    run = make_run(tmp_path, "fresh", steps=3)
    tokenizer = (run.path / "model/tokenizer.json").rename(tmp_path / "tokenizer.json")
    found = await one_trajectory(runs.trajectories("fresh"), "g00000007.1")
    assert found["parts"][0]["text"].startswith("[0][1]")
    tokenizer.rename(run.path / "model/tokenizer.json")
    found = await one_trajectory(runs.trajectories("fresh"), "g00000007.1")
    assert found["parts"][0]["text"].startswith("<|user|> sort")


async def test_a_trajectory_has_its_tokens_by_turn(stored: RunDirectory):
    found = await one_trajectory(StoredTrajectories(stored), "g00000007.1")
    expected = two_turns(7, 1, 4)
    assert found["training"] == "trained in step 4 with weight 1"
    assert (found["trajectory"]["reward"], found["components"]) == (1.0, {"format": 1.0})
    assert [one["id"] for one in found["group"]] == ["g00000007.0", "g00000007.1"]
    prompt, first, between, second = found["parts"]
    assert prompt == {"turn": None, "start": 0, "stop": 6, "text": "<|user|> sort 4 1 3 <|assistant|> "}
    assert (first["turn"], first["texts"][:2], first["versions"]) == (1, ["the ", "smallest "], [4] * 8)
    np.testing.assert_allclose(first["logprobs"], expected.behaviour_logprobs[6:14], atol=5e-5)
    assert (between["start"], between["stop"]) == (14, 16)
    assert (second["turn"], second["reward"], second["mask"]) == (2, 0.5, [1] * (len(WORDS) - 16))
    assert json.loads(json.dumps(found, allow_nan=False)) == found


async def test_a_trajectory_has_its_label_advantage_and_siblings(stored: RunDirectory):
    source = StoredTrajectories(stored)
    found = await one_trajectory(source, "g00000007.1")
    assert (found["label"], found["advantage"]) == ("label 2", 0.5)
    assert [one["advantage"] for one in found["group"]] == [-0.5, 0.5]
    assert (await one_trajectory(source, "g00000007.1", labelled=False))["label"] is None
    group = await one_group(source, 7)
    assert (group["label"], group["prompt"]) == ("label 2", "<|user|> sort 4 1 3 <|assistant|> ")
    assert [(one["id"], one["advantage"], one["reward"]) for one in group["answers"]] == [
        ("g00000007.0", -0.5, 0.0), ("g00000007.1", 0.5, 1.0),
    ]  # fmt: skip
    assert group["answers"][0]["text"].startswith("the smallest of them")
    assert (await one_group(source, 7, labelled=False))["label"] is None
    with pytest.raises(ConfigError, match="the group of lease 99 is not complete"):
        await one_group(source, 99)


async def test_why_a_trajectory_was_not_trained_is_told(tmp_path: Path):
    run = make_run(tmp_path, "whys", steps=3)

    async def told(lease: int) -> str:
        return (await one_trajectory(StoredTrajectories(run), f"g{lease:08}.0"))["training"]

    with closing(Ledger.open(run.ledger)) as ledger, closing(ReplayStore.open(run.replay(0))) as store:
        rejected, waiting, given, opponent, late = (lease * 2 for lease in range(6, 11))
        ledger.issue(20, 3)
        for lease in (rejected, waiting, given, opponent, late):
            changes = {opponent: {"trainable": False}, late: {"end": "timeout"}}.get(lease, {})
            store.append([two_turns(lease, 0, 3, group_size=1, **changes)])
            ledger.store(lease)
        ledger.reject(rejected, "stale")
        ledger.lease(4, [given], [0.25])
        ledger.flush()
    assert await told(rejected) == "not trained, because its group was rejected: stale"
    assert await told(opponent) == "not trained, because solver is not the policy that is trained"
    assert await told(late) == "not trained, because its end, timeout, says nothing about the policy"
    assert await told(waiting) == "not trained, because the run is finished and no step trained on its group"
    write_json(run.path / "progress.json", {"stage": "rl", "step": 3, "policy_version": 4})
    with (run.path / "lock").open("w"):  # a process that goes on with the run
        assert await told(waiting) == "not trained yet: its group waits for a step"
        assert await told(given) == "given to step 4, which has not ended"
        trained_facts.write(run.path, 4, {f"g{given:08}.0": TrainedFacts(0.0, None)})
        assert await told(given) == "trained in step 4 with weight 0.25"


async def test_what_is_not_there_is_named(stored: RunDirectory):
    source = StoredTrajectories(stored)
    with pytest.raises(ConfigError, match=r"g00000099\.0 is not among the complete groups"):
        await one_trajectory(source, "g00000099.0")
    with pytest.raises(ConfigError, match="names no trajectory"):
        await one_trajectory(source, "../../etc/passwd")


async def test_ratios_are_those_of_the_trained_tokens_of_what_the_learner_recorded(stored: RunDirectory):
    found = await one_trajectory(StoredTrajectories(stored), "g00000007.1")
    assert found["learner"] == {"step": 4, "version": 4}
    trajectory = two_turns(7, 1, 4)
    expected = np.exp(logprobs_of(trajectory) - trajectory.behaviour_logprobs[trajectory.loss_mask])
    turns = [part["ratios"] for part in found["parts"] if part["turn"] is not None]
    assert [ratio for ratios in turns for ratio in ratios] == pytest.approx(expected.tolist(), abs=1e-4)
    assert min(expected) < 0.5 < 1.5 < max(expected)
    other = await one_trajectory(StoredTrajectories(stored), "g00000007.0")
    assert other["learner"] is None
    assert {part["ratios"] for part in other["parts"] if part["turn"] is not None} == {None}


def test_tokens_that_are_not_trained_have_no_ratio_and_log_probs_of_another_trajectory_count_for_nothing():
    trajectory = two_turns(7, 1, 4)
    mask = trajectory.loss_mask.copy()
    mask[10:14] = False
    masked = replace(trajectory, loss_mask=mask)
    wide = logprobs_of(masked)
    wide[0] = masked.behaviour_logprobs[6] + 99  # whatever it is, it has to be written as JSON
    ratios = importance_ratios(masked, TrainedLogprobs(1, 1, wide))
    assert [place for place, ratio in enumerate(ratios) if ratio is not None] == np.flatnonzero(mask).tolist()
    assert ratios[6] == pytest.approx(np.exp(20))
    assert importance_ratios(trajectory, TrainedLogprobs(1, 1, wide)) is None


async def test_those_with_a_record_are_listed_alone(stored: RunDirectory):
    assert await names(stored, recorded=True) == ["g00000011.1", "g00000007.1"]
    assert await names(stored, recorded=True, step=4) == ["g00000007.1"]
    assert await names(stored, recorded=True, most_reward=0.0) == []


@pytest.mark.nats
async def test_shards_on_other_hosts_are_asked_over_the_bus(bus: Bus, bus_server: NatsServer, tmp_path: Path):
    write_tokenizer(tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "model/tokenizer_config.json").write_text("{}")
    files = await put_only_blob(bus, Publisher(bus), encode(bundle(tmp_path / "model")), "model")
    await bus.put("policy", replace(manifest(4), model=files))
    config = validate({"run": "test", "replay": {"shards": 2}})
    await bus.put("run", RunRecord(name="test", config_json=config.model_dump_json()))
    where = RunConfig(run="test", bus=BusConfig(url=bus_server.url))
    source = BusTrajectories(lambda: where)
    with closing(ReplayStore.open(tmp_path / "0")) as even, closing(ReplayStore.open(tmp_path / "1")) as odd:
        for lease in range(5):
            (even, odd)[lease % 2].append([two_turns(lease, n, 3) for n in range(SAMPLES)])
        async with (
            running(make_shard(bus, even, 0).run),
            running(make_shard(bus, odd, 1).run),
            asyncio.timeout(30),
        ):
            found = await trajectory_list(source, TrajectoryFilter(least_reward=1))
            one = await one_trajectory(source, "g00000003.1")
            with pytest.raises(ConfigError, match="steps are known on the host of the run's storage only"):
                await trajectory_list(source, TrajectoryFilter(step=1))
            with pytest.raises(ConfigError, match="known on the host of the run's learner only"):
                await trajectory_list(source, TrajectoryFilter(recorded=True))
    assert [one["id"] for one in found["trajectories"]] == [f"g0000000{n}.1" for n in (4, 3, 2, 1, 0)]
    assert one["parts"][1]["texts"][0] == "the "
    assert one["training"] == "not known here: the run's ledger is on another host"
    assert (one["advantage"], one["label"], one["learner"]) == (None, None, None)


@settings(max_examples=15)
@given(st.text(max_size=40))
def test_texts_of_bytes_join_to_the_text_whatever_its_characters(text: str):
    vocabulary = {token: n for n, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids = tokenizer.encode(text).ids
    texts = token_texts(ids, lambda part: str(tokenizer.decode(list(part))))
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_without_a_tokenizer_ids_stand_for_themselves(tmp_path: Path):
    assert token_texts([5, 17], decoder(tmp_path)) == ["[5]", "[17]"]
