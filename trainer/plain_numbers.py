"""Numbers as a state may hold them."""

from typing import Any

import numpy as np


def without_numpy(value: Any) -> Any:
    """Return nested values with NumPy's numbers as Python's, which torch.load(weights_only=True) takes."""
    if isinstance(value, np.generic):
        return value.item()
    # Exactly: subclasses, such as Counter and named tuples, are built in ways of their own.
    if type(value) is dict:
        return {key: without_numpy(item) for key, item in value.items()}
    return type(value)(map(without_numpy, value)) if type(value) in (list, tuple) else value
