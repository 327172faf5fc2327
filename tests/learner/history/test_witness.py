"""The weights of a real run say of a group that it was trained on once, and would say so if it were not."""

import asyncio
from contextlib import ExitStack, closing

import pytest

from bus.errors import ConfigError
from learner.history.retrain import largest_difference, retrain_steps, weights_at
from learner.history.witness import Witness, newest_witness, witness
from learner.initial.initial import prepare
from storage.store.replay import ReplayStore
from tests.learner.mini_run import MiniRun, in_one_process, past_run
from tests.storage.serving import SHARDS

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.usefixtures("in_process")]


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> MiniRun:
    """Six steps; the learner was killed after the third, so that it was trained again after a resume."""
    with pytest.MonkeyPatch.context() as patch:
        in_one_process(patch)
        return asyncio.run(past_run(tmp_path_factory.mktemp("witness"), steps=6, killed_after=3))


@pytest.fixture
def stores(past: MiniRun):
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(ReplayStore.open(past.directory / str(n), writable=False)))
            for n in range(SHARDS)
        ]


@pytest.mark.parametrize("step", [3, 5, 6])
def test_the_weights_say_that_a_group_was_trained_on_once_also_where_a_resume_trained_it_again(
    past: MiniRun, stores, step
):
    settings = past.settings()
    initial = prepare(settings, past.demonstrations)
    lease = past.steps()[step].leases[1]
    found = witness(settings, initial, stores, lease)
    assert (found.lease, found.step, found.checkpoint) == (lease, step, 4 if step == 3 else 6)
    assert found.trained == "once"
    assert found.differences["once"] == 0
    assert min(found.differences["never"], found.differences["twice"]) > 1e-5


@pytest.mark.parametrize("uses", [0, 2])
def test_it_tells_a_run_that_left_the_group_out_or_trained_on_it_twice(
    past: MiniRun, stores, uses, monkeypatch
):
    """Weights that a learner would have left that is wrong in this way stand in for the checkpoint's."""
    settings = past.settings()
    initial = prepare(settings, past.demonstrations)
    lease, wrong = past.steps()[5].leases[0], {}
    for _ in retrain_steps(
        settings, initial, stores, from_step=4, to_step=6, uses={lease: uses},
        at_end=lambda backend: wrong.update(backend.export()),
    ):  # fmt: skip
        pass
    right = weights_at(settings, initial, 6)
    assert right is not None
    assert largest_difference(right, wrong) > 1e-5
    monkeypatch.setattr("learner.history.witness.weights_at", lambda *_: wrong)
    assert witness(settings, initial, stores, lease).trained == {0: "never", 2: "twice"}[uses]


def test_a_group_that_no_checkpoint_has_is_refused_and_one_of_the_newest_is_chosen(past: MiniRun, stores):
    settings = past.settings()
    with pytest.raises(ConfigError, match="lease 999 was not trained on"):
        witness(settings, prepare(settings, past.demonstrations), stores, 999)
    assert newest_witness(settings, stores) in past.steps()[6].leases


@pytest.mark.parametrize(
    ("once", "never", "twice", "trained"),
    [(0.0, 0.0, 0.0, "not clear"), (0.1, 0.2, 0.3, "not clear"), (1e-6, 1e-3, 1e-3, "once")],
)
def test_without_a_clear_difference_nothing_is_claimed(once, never, twice, trained):
    differences = {"once": once, "never": never, "twice": twice}
    assert Witness(lease=0, step=1, checkpoint=1, differences=differences).trained == trained
