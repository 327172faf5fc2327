"""A built-in task with pictures: count the shapes in a drawing."""

import base64
from io import BytesIO
from random import Random

from PIL import Image, ImageDraw

from bus.codec import Json

CELLS, CELL = 3, 8
"""Cells in a row of a picture, and the pixels of one, in which there is one shape at most."""
MARGIN = 1
"""Pixels around a shape in its cell."""
MOST = 6
"""Most shapes in a picture; there is one at least."""
COLOURS = ((220, 40, 40), (40, 160, 60), (50, 80, 220), (230, 160, 20))
PAPER = (245, 245, 245)
COUNT_PROBLEMS = 10**6


def count_problem(number: int) -> tuple[list[Json], str]:
    """Return a message that shows a picture and asks how many shapes it has, and the answer."""
    rng = Random(number)
    shapes = rng.randint(1, MOST)
    content: list[Json] = [
        {"type": "image_url", "image_url": {"url": _picture(shapes, rng)}},
        {"type": "text", "text": "shapes?"},
    ]
    return [{"role": "user", "content": content}], str(shapes)


def count_demonstration(number: int, rng: Random, wrong: bool) -> str:
    """Return the number of shapes; a wrong answer is off by one."""
    shapes = Random(number).randint(1, MOST)
    return str(shapes + rng.choice((-1, 1)) if wrong else shapes)


def _picture(shapes: int, rng: Random) -> str:
    picture = Image.new("RGB", (CELLS * CELL, CELLS * CELL), PAPER)
    draw = ImageDraw.Draw(picture)
    for cell in rng.sample(range(CELLS**2), shapes):
        left, top = cell % CELLS * CELL + MARGIN, cell // CELLS * CELL + MARGIN
        box = (left, top, left + CELL - 2 * MARGIN - 1, top + CELL - 2 * MARGIN - 1)
        rng.choice((draw.ellipse, draw.rectangle))(box, fill=rng.choice(COLOURS))
    file = BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
