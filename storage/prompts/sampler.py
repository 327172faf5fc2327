"""A sampler of the user's own, which decides which prompts come next by what is known of each."""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import index
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bus.codec import Json
from bus.errors import ConfigError, with_traceback
from bus.messages import Prompt
from bus.process.daemon_call import in_daemon_thread
from bus.process.plugins import load_function
from bus.waiting import unless
from storage.ledger.ledger import Ledger
from storage.prompts.data_sets import DataSets
from storage.settings.data import SamplerConfig

CHOOSING_S = 300.0
"""Longest time that a sampler may take."""
_REWARDS, _STATE = "prompt_rewards.", "sampler_state."
"""Prefixes of the ledger's facts on the rewards of prompts, and on what a sampler keeps."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What a sampler is asked, and what is known of the P prompts of the run, by their index in the file."""

    count: int
    """How many prompts come next."""
    prompts: Sequence[Prompt]
    drawn: NDArray[np.int64]
    """[P], how often each was drawn."""
    groups: NDArray[np.int64]
    """[P], groups of each whose rewards are known, filtered ones among them."""
    reward_mean: NDArray[np.float64]
    """[P], mean reward of these groups; NaN where there is none."""
    quarantined: NDArray[np.bool_]
    """[P], prompts whose leases are refunded at once."""
    rng: np.random.Generator
    """Seeded by the run's seed and the number of the next lease: a draw that is repeated is the same."""
    state: dict[str, Json]
    """What the sampler keeps: it may change this, and finds it so at the next draw and after a restart."""


Sampler = Callable[[Draw], Sequence[int]]
"""Returns the indices of `Draw.count` prompts, in their order; one may come several times."""


class NamedSampler(NamedTuple):
    """A sampler of the user's own, with its settings, and its name."""

    name: str
    function: Sampler


def load_sampler(config: SamplerConfig) -> NamedSampler | None:
    """Import the sampler that the settings name. Raises `ConfigError` for one that cannot be called so."""
    if config.function is None:
        return None
    function: Sampler = load_function("sampler", config.function, {})
    try:
        inspect.signature(function).bind("draw", **config.settings)
    except TypeError as error:
        raise ConfigError(
            f"sampler {config.function!r} has the parameters {inspect.signature(function)} and gets a Draw "
            f"and data.sampler.settings: {error}; change one of the two"
        ) from error
    return NamedSampler(config.function, partial(function, **config.settings))


class PickedPrompts:
    """Has a sampler choose the prompts of leases when these can be issued.

    What was chosen, what is known of each prompt and what the sampler keeps are in the ledger, and reach the
    disk with the leases."""

    wants_rewards = True

    def __init__(self, ledger: Ledger, data: DataSets, sampler: NamedSampler, *, seed: int) -> None:
        self._ledger = ledger
        self._data = data
        self._name, self._function = sampler
        self._seed = seed
        self._known = "", np.zeros((0, 2))
        """Digest of a data set, and [P, 2]: groups of its prompts, and the sums of their mean rewards."""
        self.waits_for = ""

    @property
    def left(self) -> int:
        """Return how many leases may be issued whose prompts were chosen."""
        return self._data.latest.first_lease + len(self._data.picked) - self._ledger.next_id

    async def extend(self, wanted: int, stop: asyncio.Event) -> None:
        """Have the sampler choose for `wanted` leases. Raises `ConfigError` for what it does, returns or
        keeps."""
        if (count := wanted - self.left) <= 0:
            return
        draw, asked_for = self._draw(count), self._data.latest
        self.waits_for = f"waiting for data.sampler {self._name!r} to choose {count} prompts"
        try:
            async with asyncio.timeout(CHOOSING_S) as limit:
                chosen = await unless(stop, in_daemon_thread(lambda: self._choice(draw), "sampler"))
        except Exception as error:  # a user's function may raise anything
            if isinstance(error, TimeoutError) and limit.expired():
                raise ConfigError(f"sampler {self._name!r} took longer than {CHOOSING_S:g} s") from error
            raise ConfigError(with_traceback(f"sampler {self._name!r} raised {error!r}", error)) from error
        self.waits_for = ""
        # indices of prompts that others have replaced meanwhile mean nothing: the dispatcher asks again
        if not (chosen is None and stop.is_set()) and self._data.latest is asked_for:
            picked, state = self._checked(chosen, draw), self._encoded(draw.state)
            self._data.pick(picked)
            self._ledger.set_fact(f"{_STATE}{self._name}", state)

    def _choice(self, draw: Draw) -> object:
        """Return what the function returns, or the first that it yields: it yields within the time limit."""
        chosen = self._function(draw)
        return list(islice(chosen, draw.count + 1)) if isinstance(chosen, Iterator) else chosen

    def note(self, lease_id: int, rewards: Sequence[float]) -> None:
        """Count the group of a lease for its prompt, if its rewards are known."""
        if rewards:
            digest, number = self._data.index(lease_id)
            name = f"{_REWARDS}{digest}.{number}"
            groups, total = json.loads(self._ledger.facts.get(name, "[0, 0.0]"))
            after = groups + 1, total + fmean(rewards)
            self._ledger.set_fact(name, json.dumps(after))
            if digest == self._known[0]:
                self._known[1][number] = after

    def _rewards(self) -> NDArray[np.float64]:
        digest = self._data.latest.digest
        if digest != self._known[0]:
            prefix, found = f"{_REWARDS}{digest}.", np.zeros((self._data.latest.count, 2))
            for name, fact in self._ledger.facts.items():
                if name.startswith(prefix):
                    found[int(name.removeprefix(prefix))] = json.loads(fact)
            self._known = digest, found
        return self._known[1]

    def _draw(self, count: int) -> Draw:
        data, prompts = self._data, self._data.latest.count
        groups, totals = self._rewards().T
        quarantined = np.zeros(prompts, bool)
        quarantined[data.quarantined_indices()] = True
        return Draw(
            count=count,
            prompts=data.prompts,
            drawn=np.bincount(np.asarray(data.picked, np.int64), minlength=prompts),
            groups=groups.astype(np.int64),
            reward_mean=np.where(groups > 0, totals / np.maximum(groups, 1), np.nan),
            quarantined=quarantined,
            rng=np.random.default_rng([self._seed, self._ledger.next_id + self.left]),
            state=json.loads(self._ledger.facts.get(f"{_STATE}{self._name}", "{}")),
        )

    def _checked(self, chosen: object, draw: Draw) -> list[int]:
        what, prompts = f"sampler {self._name!r} returned", len(draw.prompts)
        try:
            found = [index(number) for number in chosen]  # type: ignore[attr-defined]  # that is found out here
        except TypeError as error:
            raise ConfigError(f"{what} {chosen!r:.100}: return the indices of prompts") from error
        if len(found) != draw.count:
            raise ConfigError(f"{what} {len(found)} prompts, where draw.count={draw.count} are wanted")
        if wrong := [number for number in found if not 0 <= number < prompts]:
            raise ConfigError(f"{what} {wrong[0]}, and prompts are numbered from 0 to {prompts - 1}")
        return found

    def _encoded(self, state: object) -> str:
        try:
            return json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"sampler {self._name!r} keeps what is no JSON in draw.state ({error}): use texts, finite "
                "numbers, lists and objects"
            ) from error
