"""States to save, and the one comparison that the tests and the demo believe: equal to the last bit."""

from trainerd.checkpoint import codec


def fingerprint(state):
    """Everything that a state is, as plain values: the tree, and each tensor's type, shape and bytes."""
    tree, leaves = codec.encode(state)
    return tree, {name: (leaf.dtype, leaf.shape, bytes(leaf.memory())) for name, leaf in leaves.items()}


def assert_same(left, right):
    """Equal bit for bit: -0.0 is not 0.0, and a NaN equals the same NaN."""
    assert fingerprint(left) == fingerprint(right)
