"""What lies in a run, as far as retention must know: each manifest is read once, since manifests never change."""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trainerd.checkpoint import layout
from trainerd.checkpoint.errors import Damaged, FormatTooNew
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import MANIFEST_BYTES, Manifest, RunRecord, parse_head
from trainerd.checkpoint.reader import read_manifest
from trainerd.checkpoint.retention import Candidate, candidate_of
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.terms import Ticket, named, read_run


@dataclass(frozen=True)
class Survey:
    """Every folder with a checkpoint's name is in one of these; `newest` is the manifest of the newest valid one.

    `without_manifest` gives the bytes of each file in a folder that is no checkpoint, or not yet.
    """

    newest: Manifest | None
    valid: Sequence[Candidate]
    superseded: Sequence[Candidate]
    damaged: Sequence[Candidate]
    unreadable: Sequence[CheckpointName]
    without_manifest: dict[CheckpointName, dict[str, int]]


@dataclass(frozen=True)
class _Bare:
    """A folder without a manifest, and the bytes of each file in it."""

    files: dict[str, int]


@dataclass(frozen=True)
class _Broken:
    """A checkpoint that is not whole; None if not even its manifest can be read."""

    candidate: Candidate | None


_Found = Candidate | _Broken | _Bare


class Surveyor:
    """Surveys one run again and again; what was found whole once is not looked at again, but for the newest."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._whole: dict[CheckpointName, Candidate] = {}

    def survey(self, tickets: Sequence[Ticket]) -> Survey:
        """Look at what is new. After StorageUnusable or RunDamaged nothing is known, and nothing may be deleted."""
        names = named(self._storage)
        found: dict[CheckpointName, _Found] = {name: self._whole[name] for name in names if name in self._whole}
        found |= self._look_at([name for name in names if name not in found])
        lineage = _on_lineage(names, tickets)
        newest = self._confirm_newest(found, (name for name in reversed(names) if name in lineage))
        self._whole = {name: what for name, what in found.items() if isinstance(what, Candidate)}
        broken = {name: what.candidate for name, what in found.items() if isinstance(what, _Broken)}
        return Survey(
            newest,
            valid=[candidate for name, candidate in self._whole.items() if name in lineage],
            superseded=[candidate for name, candidate in self._whole.items() if name not in lineage],
            damaged=[candidate for candidate in broken.values() if candidate],
            unreadable=[name for name, candidate in broken.items() if not candidate],
            without_manifest={name: what.files for name, what in found.items() if isinstance(what, _Bare)},
        )

    def _look_at(self, names: Sequence[CheckpointName]) -> dict[CheckpointName, _Found]:
        run = read_run(self._storage)
        folders = _Folders(self._storage)
        with ThreadPoolExecutor(self._storage.guarantees.parallel, thread_name_prefix="trainerd-survey") as pool:
            return dict(zip(names, pool.map(lambda name: self._look(name, run, folders), names), strict=True))

    def _look(self, name: CheckpointName, run: RunRecord | None, folders: "_Folders") -> _Found:
        files = folders.sizes(str(name))
        if layout.MANIFEST not in files:
            return _Bare(files)
        if files[layout.MANIFEST] > MANIFEST_BYTES:
            return _Broken(None)
        try:
            head = parse_head(self._storage.read(name.manifest), name)
        except FileNotFoundError:
            return _Bare(files)
        except (Damaged, FormatTooNew):
            return _Broken(None)
        candidate = candidate_of(head)
        whole = (run is None or run.run == head.run) and all(
            folders.sizes(folder).get(file) == size
            for path, size in candidate.files.items()
            for folder, _, file in [path.partition("/")]
        )
        return candidate if whole else _Broken(candidate)

    def _confirm_newest(
        self, found: dict[CheckpointName, _Found], newest_first: Iterable[CheckpointName]
    ) -> Manifest | None:
        """The newest manifest that passes every check that a resume makes; those that do not become broken."""
        for name in newest_first:
            candidate = found[name]
            if isinstance(candidate, Candidate):
                try:
                    return read_manifest(self._storage, name)
                except Damaged:
                    found[name] = _Broken(candidate)
        return None


class _Folders:
    """Lengths of the files in checkpoints' folders, each listed once."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._sizes: dict[str, dict[str, int]] = {}

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each file in a checkpoint's folder."""
        if folder not in self._sizes:
            self._sizes[folder] = self._storage.sizes(f"{layout.CHECKPOINTS}/{folder}")
        return self._sizes[folder]


def _on_lineage(names: Iterable[CheckpointName], tickets: Sequence[Ticket]) -> set[CheckpointName]:
    """As `terms.counts` for many: the tickets are gone through once for each term."""
    names = list(names)
    bounds = {
        term: min((ticket.resumed_from for ticket in tickets if ticket.term > term), default=math.inf)
        for term in {name.term for name in names}
    }
    return {name for name in names if name.step <= bounds[name.term]}
