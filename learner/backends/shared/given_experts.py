"""Sends tokens to the experts that an engine or an earlier pass chose (router replay, arXiv:2510.11370).

Engine and learner compute with other kernels, so that their routers choose other experts for some tokens,
whose log-probs then differ by much more than rounding. With replay the learner's router only weighs the
experts that were chosen, and its gradient goes through these weights."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from bus.errors import ConfigError
from learner.distributed.process_group import device


class GivenExperts:
    """The experts of a layer for the pass that it is in."""

    def __init__(self) -> None:
        self.experts: Tensor | None = None
        """int [T, k], `OWN_CHOICE` (learner/data/packing.py) where the router chooses; None where it does for
        all tokens."""
        self.noted: list[Tensor] | None = None
        """int16 [T, k] of each pass, where its tokens went; None where nobody asks."""
        self.counts = torch.zeros(3, dtype=torch.int64, device=device())
        """Tokens of passes with given experts since they were last counted, how many of them were sent as
        given, and how many of these the router would have sent elsewhere."""

    def instead_of(self, chosen: Tensor, count: int) -> Tensor:
        """Return where tokens go that the router would send to `chosen`, [T, k], of `count` experts."""
        if self.experts is not None:
            chosen = self._given(self.experts.long(), chosen, count)
        if self.noted is not None:
            self.noted.append(chosen.to(torch.int16))
        return chosen

    def _given(self, given: Tensor, chosen: Tensor, count: int) -> Tensor:
        ascending = given.sort(dim=1).values
        # What an engine cannot have meant is left to the router: the dispatcher wants k different experts.
        # Negative are `OWN_CHOICE`, and numbers of two bytes that int16 does not hold.
        known = (ascending[:, 0] >= 0) & (ascending[:, -1] < count)
        known &= (ascending[:, 1:] != ascending[:, :-1]).all(dim=1)
        other = (ascending != chosen.sort(dim=1).values).any(dim=1)
        self.counts += torch.stack((torch.full_like(known, True).sum(), known.sum(), (known & other).sum()))
        return torch.where(known[:, None], given, chosen)


def replay_figures(layers: Iterable[GivenExperts]) -> dict[str, float]:
    """Return what came of given experts since the last call; nothing where none were given.

    Counted are the tokens of passes that had some, in each layer with experts on all ranks.
    `router_replayed_fraction` is the share that was sent as given: the last token of a sequence and padding
    never are. `router_changed_fraction` is the share of these that the router would have sent elsewhere.

    Every rank calls this with what the layers of its model are given."""
    counts = torch.zeros(3, dtype=torch.int64, device=device())
    for each in layers:
        counts += each.counts
        each.counts.zero_()
    dist.all_reduce(counts)
    passed, replayed, changed = counts.tolist()
    if not passed:
        return {}
    return {
        "router_replayed_fraction": replayed / passed,
        "router_changed_fraction": changed / max(1, replayed),
    }


def refuse_other_experts(experts: Tensor, *, layers: int, per_token: int) -> None:
    """Raise `ConfigError` for experts [T, layers, k] of another model's layers."""
    if experts.shape[1:] != (layers, per_token):
        raise ConfigError(
            f"trajectories name {experts.shape[2]} experts a token in {experts.shape[1]} layers, the model "
            f"has {per_token} in {layers}: they are of another model; set learner.router_replay=none"
        )
