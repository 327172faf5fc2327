"""What is done to the tensors that one rank has of a version: quantising, coding, digests."""

import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from learner.config.publication import PublicationConfig
from learner.publication.lent_weights import lent_among, owned
from storage.weights.deltas import EncodedTensors, encode_tensors
from storage.weights.quantisation import FORMATS
from storage.weights.quantised_tensors import Kind, quantised, quantised_kinds
from storage.weights.tensors import HostTensor, Weights, spare_threads

Tensors = Mapping[str, HostTensor]


def publishing_threads(config: PublicationConfig) -> int:
    """Return how many threads work on a publication."""
    return config.threads or spare_threads()


class TensorEncoder:
    """Works in threads, beside training."""

    def __init__(self, config: PublicationConfig) -> None:
        self.threads = publishing_threads(config)
        self.format = FORMATS.get(config.quantisation)
        """Format in which weights are published; None for their own."""

    def in_format(self, tensors: Tensors) -> Tensors:
        """Return the tensors as they are published. They are whole, so how ranks share the model makes no
        difference."""
        if self.format is None:
            return tensors
        lent = lent_among(tensors)
        if lent is not None:
            lent.keep()  # each tensor is read several times
        with ThreadPoolExecutor(self.threads, "quantise") as threads:
            found = quantised(tensors, self.format, threads)
        return {name: owned(tensor) for name, tensor in found.items()}

    def kinds(self, kinds: Mapping[str, Kind]) -> Mapping[str, Kind]:
        """Return the kinds of what `in_format` makes of tensors of these."""
        return kinds if self.format is None else quantised_kinds(kinds, self.format)

    def encoded(
        self, base: Weights, tensors: Tensors, *, most_bytes: int = sys.maxsize
    ) -> EncodedTensors | None:
        """Return what a delta has of the tensors; None where that is more than `most_bytes`."""
        with ThreadPoolExecutor(self.threads, "encode") as threads:
            return encode_tensors(base, tensors, threads, most_bytes=most_bytes)

    def digests(self, tensors: Tensors) -> Mapping[str, bytes]:
        with ThreadPoolExecutor(self.threads, "hash") as threads:
            return Weights.of(0, tensors, threads).digests
