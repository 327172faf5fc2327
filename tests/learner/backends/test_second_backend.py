"""The loop, checkpoints, publication and retraining over another backend: the protocol is all they know."""

import asyncio
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from learner.backends import factory
from learner.backends.model_loading import load_hf_directory
from learner.history.retrain import retrain_steps
from learner.initial.initial import prepare
from storage.store.replay import ReplayStore
from tests.learner.backends.torch_backend import TorchBackend
from tests.learner.mini_run import MiniRun, in_one_process, mini_run, past_run
from tests.storage.serving import SHARDS

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.usefixtures("in_process")]
STEPS = 4


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> MiniRun:
    """A run that `TorchBackend` trained; its learner was killed after step 3, with a checkpoint of step 2."""
    with pytest.MonkeyPatch.context() as patch:
        in_one_process(patch)
        patch.setitem(factory.BACKENDS, "megatron", lambda: TorchBackend)
        return asyncio.run(past_run(tmp_path_factory.mktemp("torch"), steps=STEPS, killed_after=3))


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
async def test_our_backends_train_the_same_steps_to_float_tolerance(
    of_torch: MiniRun, bus, tmp_path: Path, backend: str
):
    async with mini_run(bus, tmp_path) as run:
        await run.train_and_die(3, backend=backend)
        await run.train(steps=STEPS, backend=backend)
    ours, theirs = run.steps(), of_torch.steps()
    assert [ours[step].batch_xxh3 for step in ours] == [theirs[step].batch_xxh3 for step in theirs]
    for step in range(1, STEPS + 1):
        for number in ("loss", "grad_norm", "entropy", "lr"):
            expected = getattr(theirs[step], number)
            assert getattr(ours[step], number) == pytest.approx(expected, rel=1e-4, abs=1e-6), (step, number)
    (_, ours_after), (_, theirs_after) = (load_hf_directory(r.directory / "export") for r in (run, of_torch))
    assert ours_after.keys() == theirs_after.keys()
    for name, weight in theirs_after.items():
        assert (ours_after[name] - weight).abs().max() < 1e-4, name


def test_its_resumed_run_is_trained_again_bit_for_bit(of_torch: MiniRun, monkeypatch):
    monkeypatch.setitem(factory.BACKENDS, "megatron", lambda: TorchBackend)
    settings = of_torch.settings()
    with ExitStack() as stack:
        stores = [
            stack.enter_context(closing(ReplayStore.open(of_torch.directory / str(n), writable=False)))
            for n in range(SHARDS)
        ]
        initial = prepare(settings, of_torch.demonstrations)
        steps = list(retrain_steps(settings, initial, stores, from_step=0, to_step=STEPS))
    assert [(step.step, step.differs) for step in steps] == [(n, False) for n in range(1, STEPS + 1)]
