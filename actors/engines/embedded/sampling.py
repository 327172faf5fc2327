"""Drawing one token per row from a batch of logits."""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from bus.config import MOST_KEPT
from storage.exact_arithmetic.softmax import block_rows, log_softmax


@dataclass(frozen=True, slots=True)
class Controls:
    """The sampling settings of n rows, as arrays of length n."""

    temperature: np.ndarray
    """float32; 0 is greedy."""
    top_p: np.ndarray
    """float32; 1 keeps all."""
    top_k: np.ndarray
    """int64; 0 keeps all."""
    min_p: np.ndarray
    """float32; 0 keeps all."""
    keep_masks: np.ndarray
    """bool; whether what is kept is to be told."""

    def rows(self, rows: slice) -> "Controls":
        """Return the settings of some of the rows."""
        return Controls(*(getattr(self, each.name)[rows] for each in fields(self)))

    @property
    def cuts_off(self) -> np.ndarray:
        """Tell which rows are drawn from some of the vocabulary alone, bool [n]."""
        cut: np.ndarray = (self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)
        return cut & (self.temperature > 0)

    @property
    def recorded(self) -> np.ndarray:
        """Tell of which rows the kept tokens are to be told, bool [n]."""
        recorded: np.ndarray = self.keep_masks & self.cuts_off
        return recorded

    @property
    def most(self) -> np.ndarray:
        """Return the most tokens that each row keeps, int64 [n]; 0 for all."""
        bounded = np.where(self.top_k == 0, MOST_KEPT, np.minimum(self.top_k, MOST_KEPT))
        return np.where(self.recorded, bounded, self.top_k)


Drawn = tuple[Tensor, Tensor, list[np.ndarray] | None]


def sample(logits: Tensor, controls: Controls, generator: torch.Generator, *, exact: bool = False) -> Drawn:
    """Draw a token for each row.

    Args:
        logits: [n, V].
        controls: the settings of the n rows.
        generator: source of randomness, on the logits' device.
        exact: compute log-probs in exact arithmetic, as the learner does then.
    Returns int64 [n] tokens; float32 [n] log-probs in nats at the row's temperature (1 for greedy rows); and
    None, or the kept token ids of each row, int32, none where they are not recorded. Log-probs are of the
    whole distribution, whatever is cut away; of the kept tokens alone where these are recorded."""
    rows, points = len(logits), None
    if not (controls.temperature == 0).all():
        points = torch.rand(rows, 1, dtype=torch.float64, device=logits.device, generator=generator)
    most = block_rows(logits.shape[-1])
    if logits.device.type != "cpu" or rows <= most:
        return _sampled(logits, controls, points, exact=exact)
    blocks = [slice(first, first + most) for first in range(0, rows, most)]
    parts = [
        _sampled(logits[block], controls.rows(block), None if points is None else points[block], exact=exact)
        for block in blocks
    ]
    tokens, logprobs = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    if not controls.recorded.any():
        return tokens, logprobs, None
    none = np.zeros(0, np.int32)
    return tokens, logprobs, [ids for of, _, kept in parts for ids in kept or [none] * len(of)]


def _sampled(logits: Tensor, controls: Controls, points: Tensor | None, *, exact: bool) -> Drawn:
    """Do what `sample` does. `points` are uniform in [0, 1), float64 [n, 1]; None where all is greedy."""
    scaled = _scaled_exactly(logits, controls.temperature) if exact else None
    if scaled is None:
        logprobs = torch.log_softmax(_scaled(logits.float(), controls.temperature), dim=-1)
    else:
        logprobs = log_softmax(scaled)
    greedy = controls.temperature == 0
    if points is None or greedy.all():
        tokens = logprobs.argmax(-1)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0], None
    mass = _kept_mass(logprobs, controls)
    tokens = _draw(mass, points)
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(tokens.device), logprobs.argmax(-1), tokens)
    found = logprobs.gather(1, tokens[:, None])[:, 0]
    recorded = controls.recorded
    if not recorded.any():
        return tokens, found, None
    rows = torch.from_numpy(np.flatnonzero(recorded)).to(mass.device)
    kept = mass[rows] > 0
    if scaled is None:
        normaliser = logprobs[rows].double().masked_fill(~kept, -torch.inf).logsumexp(-1)
        found[rows] = (found[rows].double() - normaliser).float()
    else:
        within = log_softmax(scaled[rows].masked_fill(~kept, -torch.inf))
        found[rows] = within.gather(1, tokens[rows][:, None])[:, 0]
    return tokens, found, _ids_by_row(kept, recorded)


def _ids_by_row(kept: Tensor, recorded: np.ndarray) -> list[np.ndarray]:
    of_row, ids = (found.cpu().numpy() for found in kept.nonzero(as_tuple=True))
    ends = np.searchsorted(of_row, np.arange(1, len(kept)))
    found = iter(np.split(ids.astype(np.int32), ends))
    return [next(found) if each else np.zeros(0, np.int32) for each in recorded]


def _scaled(logits: Tensor, temperature: np.ndarray) -> Tensor:
    divisor = np.where(temperature == 0, np.float32(1), temperature)
    if (divisor == divisor[0]).all():
        return logits if divisor[0] == 1 else logits / float(divisor[0])
    return logits / torch.from_numpy(divisor).to(logits.device)[:, None]


def _scaled_exactly(logits: Tensor, temperature: np.ndarray) -> Tensor:
    """Multiply by the reciprocal, as the learner does, whose last bit is another than that of a quotient."""
    divisor = np.where(temperature == 0, np.float32(1), temperature)
    return logits.float() * torch.from_numpy(divisor).to(logits.device).reciprocal()[:, None]


def _kept_mass(logprobs: Tensor, controls: Controls) -> Tensor:
    """Return the probabilities, zero outside top_k, top_p and min_p (not normalised)."""
    probs = logprobs.exp()
    if not controls.cuts_off.any():
        return probs
    ranked, order = probs.sort(dim=-1, descending=True)
    mass_before = ranked.cumsum(-1, dtype=torch.float64) - ranked
    top_p = torch.from_numpy(controls.top_p.astype(np.float64)).to(probs.device)[:, None]
    top_k = torch.from_numpy(np.where(controls.most == 0, probs.shape[1], controls.most)).to(probs.device)
    min_p = torch.from_numpy(controls.min_p).to(probs.device)[:, None]
    rank = torch.arange(probs.shape[1], device=probs.device)
    cut = ((mass_before >= top_p) & (top_p < 1)) | (rank >= top_k[:, None]) | (ranked < min_p * ranked[:, :1])
    cut[:, 0] = False
    return torch.zeros_like(probs).scatter_(1, order, ranked.masked_fill(cut, 0))


def _draw(mass: Tensor, points: Tensor) -> Tensor:
    """Invert the CDF, in float64 for large vocabularies; multinomial takes 3 to 5 times as long on CPU."""
    cdf = mass.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, points * cdf[:, -1:], right=True)[:, 0].clamp_(max=cdf.shape[1] - 1)
