"""The task with pictures: what is drawn is what the label counts."""

from collections import Counter
from io import BytesIO
from random import Random

import numpy as np
import pytest
from PIL import Image

from storage.built_in_tasks.generators import (
    PAPER,
    count_demonstration,
    count_problem,
    generate_task,
    load_demonstrations,
)
from storage.images.encoded import image_of


@pytest.mark.parametrize("number", range(20))
def test_the_label_counts_the_shapes_of_the_picture(number):
    [message], label = count_problem(number)
    with Image.open(BytesIO(image_of(message["content"][0]))) as picture:
        cells = np.asarray(picture).reshape(3, 8, 3, 8, 3)
    drawn = (cells != PAPER).any(-1).sum((1, 3))
    assert set(drawn.flat) <= {0, 24, 36}  # nothing, a circle or a square
    assert str((drawn > 0).sum()) == label


def test_right_demonstrations_give_the_label_and_wrong_ones_do_not():
    rng = Random(0)
    for number in range(50):
        _, label = count_problem(number)
        assert count_demonstration(number, rng, False) == label
        assert count_demonstration(number, rng, True) != label


@pytest.mark.nightly
@pytest.mark.slow
def test_the_files_of_the_task_are_read_back(tmp_path):
    files = generate_task("count", tmp_path, seed=0)
    pairs = load_demonstrations(files.demonstrations)
    answers = Counter(answer for _, answer in pairs)
    assert len(pairs) == 10_240
    assert answers.most_common(1)[0][1] < 0.3 * len(pairs)
