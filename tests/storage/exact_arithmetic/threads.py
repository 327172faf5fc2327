"""Two threads."""

from contextlib import contextmanager

import torch


@contextmanager
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)
