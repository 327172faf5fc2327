"""What an environment of several agents records reaches the learner: real bus, real shard, real files."""

from dataclasses import replace

import numpy as np
import pytest

from actors.engines.base import Sampling
from actors.episodes.episode import Episode
from actors.policy.policy import Policy
from actors.rewards.group_filters import load_filter
from actors.rollouts.worker import Worker
from actors.weights.follow import PolicyFollower
from benchmarks.scripted_engine import ScriptedEngine
from bus.trajectory import Parent, Turn
from learner.algorithms.advantages.step_advantages import estimate_advantages
from learner.config.advantage import GRPOAdvantage
from learner.data.batches import make_step_batch, recorded_samples
from learner.initial.scratch_model import character_tokenizer
from storage.client.reader import ReplayReader
from storage.settings.admission import AdmissionConfig
from tests.storage.serving import LearnerStandIn, read_batch, running, serving

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]
TOKENIZER = character_tokenizer()
ANSWER = [*TOKENIZER("42", add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
ONE_GROUP = AdmissionConfig(groups_per_step=1, samples_per_prompt=2, max_staleness=0)


class SolverAndCritic:
    """A solver answers, a critic comments, the solver tries again from the start; a frozen judge looks on.

    Solvers of rollout n have reward n, critics 10; the judge has a greedy turn and no part in training."""

    trajectories_per_episode: int | None = None

    async def run(self, task, policy):
        policy = policy.fresh(task.task_id)
        first = await policy.chat(task.messages)
        policy.reward_turn(first, 0.25)
        warm = replace(policy.sampling, temperature=0.5, top_p=0.9, top_k=3)
        await policy.chat("comment", agent="critic", sampling=warm)
        await policy.chat(task.messages, sampling=replace(policy.sampling, max_new_tokens=2))
        greedy = replace(policy.sampling, temperature=0.0)
        await policy.chat("judge", agent="judge", sampling=greedy, trainable=False)
        solved = float(task.task_id.endswith(".1"))
        rewards = {"solver": solved, "critic": 10.0, "judge": 0.0}
        return Episode(policy.trajectories(rewards, reward_components={"solved": solved}))


async def test_agents_turns_and_forks_reach_the_learner_and_each_agent_has_its_own_baseline(bus, tmp_path):
    engine = ScriptedEngine(lambda tokens: ANSWER)
    await engine.start()
    sampling = Sampling(max_new_tokens=8, stop_token_ids=(TOKENIZER.eos_token_id,))
    worker = Worker(
        bus,
        Policy(engine, TOKENIZER, sampling),
        SolverAndCritic(),
        follower=PolicyFollower(bus, engine),
        keep=load_filter("zero_variance"),
        shards=2,
        name="tester",
    )
    reader = ReplayReader(bus, "a")
    async with serving(bus, tmp_path, ONE_GROUP):
        await LearnerStandIn(bus).publish(0)
        async with running(lambda stop: worker.run(stop, groups_at_once=1)):
            [group] = await read_batch(reader, 1)
    reader.close()
    assert reader.read["mapped"] == 8  # from the shard's segment, not over the bus

    assert [t.episode_id for t in group] == ["g00000000/0"] * 4 + ["g00000000/1"] * 4
    solver, critic, again, judge = group[4:]
    assert [t.agent for t in group[:4]] == ["solver", "critic", "solver", "judge"]
    assert [t.trainable for t in group] == [True, True, True, False] * 2
    assert [t.end for t in group[:4]] == ["completed", "completed", "length", "completed"]
    prompt = len(solver.token_ids) - 3
    assert solver.turns == (Turn(prompt, prompt + 3, "stop", reward=0.25),)
    assert again.turns == (Turn(prompt, prompt + 2, "length"),)
    assert [turn[2:] for turn in critic.turns] == [("stop", 0.5, 0.9, 3, None, 0.0)]
    assert (solver.parent, again.parent) == (None, Parent("g00000000.4", prompt))
    assert (judge.turns[0].is_greedy, judge.loss_mask.any()) == (True, np.False_)
    assert (judge.policy_versions[-3:] == 0).all()
    assert solver.reward_components == {"solved": 1.0}
    assert {t.policy for t in group} == {"default"}

    advantages = estimate_advantages(GRPOAdvantage(std_floor=0.0), [group])
    batch = make_step_batch([group], recorded_samples([group]), advantages, policy_version=0)
    # solvers' episodes have 0 and 1, and both trajectories of an episode count once; critics are all alike
    advantages = {sample.name: sample.streams["advantages"] for sample in batch.samples}
    assert {s.name: s.streams["temperatures"] for s in batch.samples}["g00000000.1"] == 0.5
    assert advantages == {
        "g00000000.0": -1.0, "g00000000.1": 0.0, "g00000000.2": -1.0,
        "g00000000.4": 1.0, "g00000000.5": 0.0, "g00000000.6": 1.0,
    }  # fmt: skip
    assert (batch.trajectories, batch.untrainable, batch.untrusted) == (6, 2, 0)
