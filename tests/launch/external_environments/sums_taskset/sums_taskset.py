"""A taskset of verifiers 0.4 with a reward of two parts, and a metric."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def exact(self, trace) -> float:
        return float(trace.assistant_messages[-1].content == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace) -> float:
        return float(len(trace.assistant_messages[-1].content) < 5)

    @vf.metric
    async def characters(self, trace) -> float:
        return float(len(trace.assistant_messages[-1].content))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(10):
            yield SumTask(SumData(prompt=f"{a}+7?", answer=str(a + 7)), self.config.task)


__all__ = ["SumTaskset"]
