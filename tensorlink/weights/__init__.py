"""Weights: one process publishes versions of a state dict, any number of others pull the newest one.

A version is an object in the publisher's pool. Its number and descriptor lie on the publisher's board, in shared
memory, so subscribers learn of it and read it with no message, also while the publisher's interpreter is busy. A pull
holds the version that it reads, and a held version never changes: so a pull gives all of one version, whatever the
publisher does meanwhile.
"""

from tensorlink.weights.publisher import WeightPublisher
from tensorlink.weights.subscriber import WeightSubscriber

__all__ = ["WeightPublisher", "WeightSubscriber"]
