import numpy as np


def grpo_advantages(rewards: np.ndarray, *, normalize_std: bool, std_floor: float) -> np.ndarray:
    """Reward relative to the mean of its group (arXiv:2402.03300, eq. 3 with outcome rewards).

    Args:
        rewards: [G], of the rollouts of one prompt.
        normalize_std: divide by the population standard deviation; without it, Dr. GRPO (arXiv:2503.20783).
        std_floor: added to the standard deviation.

    Returns float32 [G]; all 0 when the rewards are equal or there is only one.
    """
    centred = np.asarray(rewards, np.float64) - np.mean(rewards, dtype=np.float64)
    if np.ptp(rewards) == 0:
        return np.zeros(len(centred), np.float32)
    if normalize_std:
        centred /= centred.std() + std_floor
    return centred.astype(np.float32)
