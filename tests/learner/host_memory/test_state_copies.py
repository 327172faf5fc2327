import torch

from learner.host_memory.copies import CopyBuffers


def test_copies_are_of_what_was_there_before_it_changed():
    whole = torch.arange(6.0)
    copies = CopyBuffers().copies([whole[:2], whole[2:4], whole[4:]])
    last = copies.take(2)  # in any order
    assert last.untyped_storage().nbytes() == last.nbytes  # a view's copy is without the rest
    whole[4:] = -1.0  # it is copied already
    copies.keep()
    whole[:] = -1.0
    copies.keep()
    assert [copies.take(0).tolist(), copies.take(1).tolist(), last.tolist()] == [[0, 1], [2, 3], [4, 5]]
