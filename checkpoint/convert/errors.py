"""Why something was not converted: one paragraph that names the thing and the way out."""

from trainerd.checkpoint.errors import CheckpointError


class NotConverted(CheckpointError):
    """An export, import, copy or comparison that cannot be done as asked; nothing was changed."""
