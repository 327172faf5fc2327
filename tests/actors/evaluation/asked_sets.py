"""Questions of held-out prompts, and an environment where some answers are right."""

from actors.episodes.episode import Episode
from bus.codec import encode
from bus.evaluation_messages import EvaluationTask, PromptSet
from bus.messages import Prompt
from bus.streams.blob_store import put_blob
from bus.streams.publish import Publisher


class SomeRight:
    """The first `n` samples of the n-th prompt are right; remembers tasks and their sampling."""

    trajectories_per_episode = 1

    def __init__(self):
        self.tasks = []

    async def run(self, task, policy):
        policy = policy.fresh(task.task_id)
        await policy.chat(task.messages)
        self.tasks.append(task.task_id)
        name, _, sample = task.task_id.partition(".")
        right = sample != "" and int(sample) < int(name.rpartition("-")[2])
        return Episode(trajectories=policy.trajectories(float(right)))


PROMPTS = tuple(Prompt(content=str(n)) for n in range(3))


async def ask(bus, manifest, prompts=PROMPTS, **settings):
    held_out = PromptSet(prompts=tuple(prompts))
    ref = await put_blob(bus, Publisher(bus), encode(held_out), f"heldout-{settings.get('data_set', '')}")
    task = EvaluationTask(policy=manifest, prompts=ref, **settings)
    await Publisher(bus).publish(
        bus.subject("tasks", "evaluation"), encode(task), message_id=f"{manifest.policy_version}-{settings}"
    )
