"""The reward of tasks that reasoning-gym made: its own verifier of the data set."""

import asyncio

from actors.episodes.task import Answer
from actors.rewards.answer_faults import verified
from actors.rewards.base import RewardError
from actors.rewards.builtin import reasoning_gym_verifier
from actors.rewards.builtin.message_text import text_of
from actors.rewards.builtin.verifier_processes import VerifierProcesses
from actors.settings.rewards import RewardConfig
from storage.built_in_tasks.reasoning_gym_tasks import Entry, EntryError, asked_entry, refuse_missing_package


class ReasoningGym:
    """Scores an answer to the entry that its prompt holds."""

    def __init__(self, config: RewardConfig) -> None:
        refuse_missing_package("reward=reasoning_gym")
        self._verifiers = VerifierProcesses(
            processes=config.math_processes,
            timeout_s=config.reward_timeout_s,
            module="reasoning_gym",
            prepare=reasoning_gym_verifier.prepare,
        )

    async def __call__(self, answer: Answer) -> float:
        """Return the score in [0, 1] of what stands between `<answer>` and `</answer>`, or of the whole text.

        An answer scores 0 by an `AnswerFaultError` that makes the verifier fail or take too long, where the
        entry's own does not. Raises `RewardError` for a task of another origin, and for one whose prompt does
        not ask its entry."""
        name, entry = await asyncio.to_thread(entry_of, answer)

        async def score(text: str) -> float:
            return await self._verifiers.call(reasoning_gym_verifier.score, name, entry, text)

        own = entry["answer"]
        where = f"task {answer.task_id}: the verifier of reasoning_gym/{name}"
        return await verified(
            score, _final(answer.text), control="" if own is None else str(own), lowest=0.0, where=where
        )

    async def close(self) -> None:
        await self._verifiers.close()


def entry_of(answer: Answer) -> tuple[str, Entry]:
    """Return the data set and the entry that an answer is to. Raises `RewardError` as `ReasoningGym` does."""
    prompt_text = "\n".join(text_of(message.get("content")) for message in answer.messages)
    try:
        return asked_entry(answer.metadata, prompt_text=prompt_text)
    except EntryError as error:
        raise RewardError(f"task {answer.task_id}: {error}") from error


def _final(text: str) -> str:
    _, found, rest = text.rpartition("<answer>")
    return rest.partition("</answer>")[0].strip() if found else text.strip()
