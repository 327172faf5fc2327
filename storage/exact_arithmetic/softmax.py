"""Log-probabilities of rows of logits, as learner and engine both compute them."""

from torch import Tensor

from bus.errors import ConfigError
from storage.exact_arithmetic.elementary import exp, log
from storage.exact_arithmetic.sums import MOST_FRACTIONS, sum_of_fractions

BLOCK_ELEMENTS = 1 << 20
LEAST_BLOCK_ROWS = 8


def block_rows(width: int) -> int:
    """Return how many rows of logits a CPU takes at a time: these stay in its caches, and little is made
    beside them. Torch rounds the sum of a single row otherwise than those of several."""
    return max(LEAST_BLOCK_ROWS, BLOCK_ELEMENTS // width)


def refuse_vocabulary(size: int) -> None:
    """Raise `ConfigError` for more tokens than are added up exactly."""
    if size > MOST_FRACTIONS:
        raise ConfigError(
            f"model.numerics=exact adds up at most {MOST_FRACTIONS} probabilities, the model's vocabulary "
            f"has {size} tokens: set model.numerics=fast"
        )


def largest_and_log_total(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit x of each row, and log sum exp(logits - x); float32 [n, 1] each. Logits of
    -inf change neither."""
    largest = logits.amax(-1, keepdim=True)
    return largest, log(sum_of_fractions(exp(logits - largest))).float()


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log-probabilities of all tokens, float32 [n, V]."""
    largest, log_total = largest_and_log_total(logits)
    return logits - largest - log_total
