"""Makes the directory of a run as its processes leave it: metrics, ledger, stores, tokenizer, settings."""

import json
import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models

from bus.evaluation_messages import HeldOutAnswers
from bus.messages import Metrics, Prompt
from bus.trajectory import Trajectory, TrajectoryBatch, Turn
from launch.settings.run_config import validate
from learner.data.outcomes import ImportanceRatios
from learner.metrics import trained_facts, trained_logprobs
from learner.metrics.trained_facts import TrainedFacts
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger import Ledger
from storage.metrics.held_out_answers import HeldOutStore
from storage.metrics.records import Record, append_records, evaluation_record, metrics_record
from storage.prompts.data_sets import DataSets
from storage.store.replay import ReplayStore
from tests.factories import make_trajectory
from tests.launch.messages import evaluation, metrics

PROMPT = ["<|user|>", "sort", "4", "1", "3", "<|assistant|>"]
ANSWER = ["the", "smallest", "of", "them", "is", "one", ",", "then"]
WORDS = [*PROMPT, *ANSWER, "three", "and", "four", "come", "last", ":", "1", "3", "4", "<|end|>"]
RATIOS = ("0.5", "0.8", "0.95", "1.05", "1.25", "2.0", "more")
RATIO_SHARES = (0.02, 0.05, 0.13, 0.6, 0.14, 0.05, 0.01)
GROUPS_A_STEP = 4
SAMPLES = 2


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer whose token n says "wn ", but for the first ones, which are `WORDS`."""
    directory.mkdir(parents=True, exist_ok=True)
    names = {f"{word} " if word not in WORDS[:n] else f"{word}{n} ": n for n, word in enumerate(WORDS)}
    vocabulary = names | {f"w{n} ": n for n in range(len(WORDS), 100)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="w99 "))
    raw.decoder = decoders.Fuse()
    raw.save(str(directory / "tokenizer.json"))


def two_turns(lease: int, sample: int, version: int, **changes: object) -> Trajectory:
    """A trajectory of 24 tokens: a prompt, a turn by `version`, text between, and a turn by the next."""
    length = len(WORDS)
    versions = np.full(length, -1, np.int32)
    versions[6:14], versions[16:length] = version, version + 1
    likelihood = np.random.default_rng([lease, sample]).beta(2, 0.6, length)
    made = replace(
        make_trajectory(lease, sample, group_size=SAMPLES, tokens=length),
        token_ids=np.arange(length, dtype=np.int32),
        policy_versions=versions,
        loss_mask=versions >= 0,
        behaviour_logprobs=np.where(versions >= 0, np.log(likelihood), 0).astype(np.float32),
        turns=(Turn(6, 14, "stop"), Turn(16, length, "stop", reward=0.5)),
        reward=float(sample),
        reward_components={"format": 1.0},
        metadata={"id": f"task-{lease}"},
    )
    return replace(made, **changes)


def make_run(root: Path, name: str, *, steps: int = 40, seed: int = 0, shards: int = 2) -> RunDirectory:
    """Make a run of so many steps, whose rewards rise, with the groups of its last three steps in store."""
    run = RunDirectory(root, name)
    settings = {"run": name, "replay": {"shards": shards}, "learner": {"steps": steps}}
    admission = {"groups_per_step": GROUPS_A_STEP, "samples_per_prompt": SAMPLES, "max_staleness": 4}
    run.config.write_text(validate(settings, {"admission": admission}).model_dump_json())
    write_json(run.path / "progress.json", {"stage": "done", "step": steps, "policy_version": steps + 1})
    run.write_provenance()
    write_tokenizer(run.path / "model")
    write_metrics(run, steps, seed)
    first = max(0, steps - 3)
    ledger, stores = Ledger.open(run.ledger), [ReplayStore.open(run.replay(n)) for n in range(shards)]
    with closing(ledger):
        asked = [Prompt(content="sort 4 1 3", label=f"label {n}") for n in range(5)]
        DataSets(ledger, run.data).configure(asked, seed=0, shuffle=False, source="sort")
        for step in range(first + 1, steps + 1):
            leases = ledger.issue(GROUPS_A_STEP, step)
            for lease in leases:
                stores[lease % shards].append([two_turns(lease, n, step) for n in range(SAMPLES)])
                ledger.store(lease)
            ledger.lease(step, leases)
            ledger.commit(step)
            trained_facts.write(run.path, step, facts_of(leases))
    for store in stores:
        store.close()
    for step, lease in ((steps - 1, 7), (steps, 11)):
        recorded = {f"g{lease:08}.1": logprobs_of(two_turns(lease, 1, step))}
        trained_logprobs.write(run.path, step, step, recorded)
    return run


def write_held_out_answers(run: RunDirectory, version: int, data_set: str = "") -> None:
    """Keep a sampled and a greedy answer to each of two held-out prompts."""
    found = []
    for prompt in range(2):
        sampled, chosen = (two_turns(prompt, n, version, trainable=False) for n in range(SAMPLES))
        greedy = tuple(turn._replace(temperature=0.0) for turn in chosen.turns)
        answers = [
            replace(one, loss_mask=np.zeros_like(one.loss_mask))
            for one in (sampled, replace(chosen, turns=greedy))
        ]
        batch = TrajectoryBatch.of(answers)
        found.append(
            HeldOutAnswers(
                policy_version=version, prompt=prompt, data_set=data_set, label="1 3 4", batch=batch
            )
        )
    HeldOutStore(run.held_out_answers).keep(found, evaluations=20)


def facts_of(leases: Sequence[int]) -> dict[str, TrainedFacts]:
    """What the learner notes of a step's trajectories: the second of each group drifts with its lease."""
    still, drifted = ImportanceRatios(1.0, 0.5, 1.5, 0.0), ImportanceRatios(1.0, 0.25, 4.0, 0.125)
    facts = dict[str, TrainedFacts]()
    for lease in leases:
        for n in range(SAMPLES):
            found = drifted._replace(mean=1 + lease / 4) if n else still
            facts[f"g{lease:08}.{n}"] = TrainedFacts(n - 0.5, found)
    return facts


def logprobs_of(t: Trajectory) -> NDArray[np.float32]:
    """What the learner makes of the trained tokens: some are likelier than when they were sampled."""
    sampled = t.behaviour_logprobs[t.loss_mask]
    drift = np.linspace(-1, 1, len(sampled))
    return np.minimum(sampled + drift, 0).astype(np.float32)


def counters(version: int, time_s: float) -> Record:
    """What an actor of two engines counted by the time it took this version: 2 ms of pause for each."""
    values = {"engine/busy_s": 2 * 0.75 * 2.5 * version, "engine/pause_s": 0.002 * version, "engine/count": 2}
    return metrics_record(Metrics(source="actor-0", step=version, time_s=time_s, values=values))


def make_supervised_run(root: Path, name: str, *, steps: int = 20, margin: float = 0.1) -> RunDirectory:
    """Make a run on pairs of answers alone, which is over."""
    run = RunDirectory(root, name)
    warmup = {"steps": steps, "demonstrations": "pairs.jsonl", "loss": {"type": "dpo"}}
    settings = {"run": name, "warmup": warmup, "learner": {"steps": 0}}
    run.config.write_text(validate(settings).model_dump_json())
    write_json(run.path / "progress.json", {"stage": "done", "step": 0, "warmup_step": steps})
    run.write_provenance()
    rows = []
    for step in range(1, steps + 1):
        values = {
            "train/loss": math.log(2) - margin * step / 2, "train/response_tokens": 200 + step,
            "rewards/accuracies": min(1, 0.5 + step / 20), "rewards/margins": margin * step,
            "rewards/chosen": margin * step / 2, "rewards/rejected": -margin * step / 2,
        }  # fmt: skip
        if step % 10 == 0:
            values |= {"heldout/loss_nats": 0.7 - margin * step / 3, "heldout/rewards/accuracies": 0.75}
        values["train/stage"] = "warmup"
        event = Metrics(source="learner", step=step, time_s=time.time() - steps + step, values=values)
        rows.append(metrics_record(event))
    append_records(run.metrics, rows)
    return run


def write_metrics(run: RunDirectory, steps: int, seed: int = 0) -> None:
    """Write the metrics of steps that learn, and an evaluation every ten of them."""
    noise = np.random.default_rng(seed)
    began_s = time.time() - 2.5 * steps
    for step in range(1, steps + 1):
        learnt = 1 - math.exp(-3 * step / max(steps, 1))
        values = {
            "train/loss": -0.02 * learnt + 0.01 * noise.normal(),
            "policy/entropy_nats": 1.4 - 1.1 * learnt + 0.03 * noise.normal(),
            "train/response_tokens_mean": 20 + 60 * learnt + 3 * noise.normal(),
            "train/response_tokens_p95": 60 + 90 * learnt + 5 * noise.normal(),
            "train/response_tokens_max": 160.0,
            "reward/std": 0.4 - 0.1 * learnt,
            "reward/group_std_mean": 0.35 - 0.2 * learnt,
            "reward_part/right": 0.1 + 0.6 * learnt,
            "reward_part/format": 0.3 + 0.6 * learnt,
            "train/response_tokens": 8000.0,
            "train/grad_norm": 0.3 + 0.2 * noise.random(),
            "policy/stale_tokens_0": 0.2,
            "policy/stale_tokens_1": 0.5,
            "policy/stale_tokens_2": 0.3,
            **dict.fromkeys((f"policy/stale_tokens_{n}" for n in (4, 8, 16, 32, "more")), 0.0),
            **dict(zip((f"policy/ratio_tokens_{n}" for n in RATIOS), RATIO_SHARES, strict=True)),
            "policy/importance_ratio": 1 + 0.002 * noise.normal(),
            "policy/importance_ratio_p99": 1.08 + 0.02 * noise.random(),
            "policy/importance_ratio_max": 1.3 + 0.3 * noise.random(),
            "policy/ess_fraction": 0.99 - 0.02 * noise.random(),
            "time/step_s": 2 + 0.5 * noise.random(),
            "time/waiting_for_batch_s": 0.3 * noise.random(),
        }
        reward = 0.15 + 0.7 * learnt + 0.04 * noise.normal()
        rows = [metrics_record(metrics(step, reward=reward, time_s=began_s + 2.5 * step, **values))]
        if step % 10 == 0:
            result = evaluation(
                step + 1, 0.1 + 0.8 * learnt, 0.2 + 0.75 * learnt, scores={"pass@4": 0.3 + 0.65 * learnt}
            )
            rows.append(evaluation_record(result, step=step, time_s=began_s + 2.5 * step))
        append_records(run.metrics, rows)
        append_records(run.counters, [counters(step, began_s + 2.5 * step)])
    (run.path / "summary.json").write_text(json.dumps({"run": run.name}))
