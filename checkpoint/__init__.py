"""The store: a training state in plain files, committed whole or not at all, read without pickle.

Knows neither the trainer nor the daemon. Only `codec` and its helpers import torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Difference": "convert.diffing",
    "Exported": "convert.exporting",
    "Imported": "convert.importing",
    "NotConverted": "convert.errors",
    "copy_run": "convert.copying",
    "diff_checkpoints": "convert.diffing",
    "export_checkpoint": "convert.exporting",
    "import_checkpoint": "convert.importing",
    "CheckpointError": "errors",
    "CheckpointInfo": "listing",
    "CheckpointStore": "store",
    "Damaged": "errors",
    "FormatTooNew": "errors",
    "Keep": "retention",
    "NoCheckpoint": "errors",
    "RunDamaged": "errors",
    "RunOwned": "errors",
    "RunOwner": "ownership",
    "StorageUnusable": "errors",
    "TakenOver": "errors",
    "UnsupportedState": "errors",
    "list_checkpoints": "listing",
    "open_storage": "storage",
    "verify_checkpoints": "verifying",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 (ruff wants a literal)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
