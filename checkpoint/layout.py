"""Names on disk, made and parsed in one place. docs/checkpoint-format.md describes them."""

import re
from dataclasses import dataclass

FORMAT = 1
RUN_FILE = "run.json"
LOCK_FILE = "lock"
TERMS = "terms"
ALIVE_FILE = f"{TERMS}/alive.json"
CHECKPOINTS = "checkpoints"
PINS = "pins"
ASIDE = "aside"
MANIFEST = "manifest.json"
TEMPORARY_SUFFIX = ".tmp"

_CHECKPOINT = re.compile(r"step-([0-9]{9,18})\.t([1-9][0-9]{0,17})")
_TICKET = re.compile(r"([0-9]{6,18})\.json")
_COMMIT_MARK = re.compile(r"committed-([0-9]{6,18})\.json")
_DATA_FILE = re.compile(r"r([0-9]{5})-([0-9]{4,18})\.safetensors")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """Which checkpoint: ordered by step, then by term."""

    step: int
    term: int

    def __str__(self) -> str:
        return f"step-{self.step:09d}.t{self.term}"

    @property
    def folder(self) -> str:
        """Where it lies, relative to the run."""
        return f"{CHECKPOINTS}/{self}"

    @property
    def manifest(self) -> str:
        """Where its manifest lies, relative to the run."""
        return f"{self.folder}/{MANIFEST}"


def parse_checkpoint(name: str) -> CheckpointName | None:
    """The checkpoint that a folder's name means; None for foreign names, which are left alone."""
    match = _CHECKPOINT.fullmatch(name)
    if match is None:
        return None
    parsed = CheckpointName(int(match[1]), int(match[2]))
    # Only the one spelling counts: step-0000000001 and step-000000001 would be two folders for one checkpoint.
    return parsed if str(parsed) == name else None


def ticket_file(term: int) -> str:
    """Where the ticket of a term lies, relative to the run."""
    return f"{TERMS}/{term:06d}.json"


def commit_mark(term: int) -> str:
    """Where the record lies that a checkpoint was committed in a term, relative to the run."""
    return f"{TERMS}/committed-{term:06d}.json"


def parse_commit_mark(name: str) -> int | None:
    """The term that the name of a record in `terms/` means; None for other names."""
    match = _COMMIT_MARK.fullmatch(name)
    return int(match[1]) if match and f"{TERMS}/{name}" == commit_mark(int(match[1])) else None


def parse_ticket(name: str) -> int | None:
    """The term that a file's name in `terms/` means; None for foreign names."""
    match = _TICKET.fullmatch(name)
    return int(match[1]) if match and f"{int(match[1]):06d}.json" == name else None


def pin_file(name: CheckpointName) -> str:
    """Where the record lies that somebody pinned a checkpoint, relative to the run."""
    return f"{PINS}/{name}.json"


def parse_pin(name: str) -> CheckpointName | None:
    """The checkpoint that a file's name in `pins/` means; None for foreign names."""
    return parse_checkpoint(name.removesuffix(".json")) if name.endswith(".json") else None


def data_file(rank: int, number: int) -> str:
    """Name of a rank's data file, relative to its checkpoint."""
    return f"r{rank:05d}-{number:04d}.safetensors"


def parse_data_file(name: str) -> tuple[int, int] | None:
    """Rank and number of a data file's name; None for other names."""
    match = _DATA_FILE.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None
