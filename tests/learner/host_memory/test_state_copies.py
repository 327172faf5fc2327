import torch

from learner.host_memory.state_copies import LateCopies


def test_late_copies_are_of_what_was_there_before_it_changed():
    whole = torch.arange(6.0)
    late = LateCopies([whole[:2], whole[2:4], whole[4:]])
    copies = iter(late)
    first = next(copies)
    assert first.untyped_storage().nbytes() == first.nbytes  # a view's copy is without the rest
    whole[:2] = -1.0  # it is copied already
    late.copy()
    whole[:] = -1.0
    late.copy()
    assert [first.tolist(), *(copy.tolist() for copy in copies)] == [[0, 1], [2, 3], [4, 5]]
    assert list(late) == []
