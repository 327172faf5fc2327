"""What a soak puts around a run: a clock that moves, rollouts of known lengths."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from actors.environments.length_profile import LengthProfile
from soak.clock import ShiftedClock
from soak.paced_lengths import LONGEST, PacedLengths, expected_lengths
from soak.trajectory_account import ks_p

ASK = "import time; print(time.time(), time.monotonic())"


def test_moved_clock_shifts_the_wall_clock_and_leaves_the_monotonic_one(tmp_path):
    clock = ShiftedClock(tmp_path)
    if not clock.variables:
        pytest.skip("no C compiler here")
    clock.move(-3600)
    environment = os.environ | clock.variables
    asked = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, check=True)
    wall, monotonic = map(float, asked.stdout.split())
    assert wall == pytest.approx(time.time() - 3600, abs=30)
    assert monotonic == pytest.approx(time.monotonic(), abs=30)


def test_lengths_are_those_that_the_account_expects():
    environment = PacedLengths(PacedLengths.Settings())
    assert isinstance(environment, LengthProfile)
    drawn = np.array([environment.length(f"g{n:08d}.{sample}") for n in range(500) for sample in range(4)])
    assert (drawn.min(), drawn.max()) == (1, LONGEST)
    assert ks_p(drawn, expected_lengths(len(drawn))) > 0.01
    assert ks_p(drawn[drawn < LONGEST - 3], expected_lengths(len(drawn))) < 0.01  # the long ones are missing
