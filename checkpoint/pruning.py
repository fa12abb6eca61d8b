"""Delete what retention does not want and what failed saves left, and never a byte that somebody still needs.

All manifests go before the first data file, so that a crash anywhere leaves every checkpoint that counts whole: a file
may belong to several.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainerd.checkpoint import pins
from trainerd.checkpoint.errors import StorageUnusable
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.retention import Candidate, Keep, References, reasons
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.survey import Survey, Surveyor
from trainerd.checkpoint.terms import Ticket, newest_term, read_tickets

_logger = logging.getLogger("trainerd.checkpoint")


@dataclass(frozen=True)
class Plan:
    """What a prune does: why each checkpoint stays, which go, which folders are debris, and the bytes that this frees.

    A data file that a checkpoint which stays refers to is not freed.
    """

    kept: Mapping[CheckpointName, tuple[str, ...]]
    goes: tuple[CheckpointName, ...] = ()
    debris: tuple[CheckpointName, ...] = ()
    bytes: int = 0


def plan(
    survey: Survey,
    keep: Keep,
    *,
    term: int,
    now: float,
    hand_pins: Mapping[CheckpointName, str],
    superseded: bool = False,
    upcoming: Candidate | None = None,
) -> Plan:
    """Decide what goes. Damaged checkpoints stay, and superseded ones unless they are to go.

    With an `upcoming` checkpoint, which is not there yet, go those that will not be wanted once it is; but not the
    newest valid one, on which everything rests until then.
    """
    steps = survey.newest.pinned if survey.newest else ()
    candidates = [*survey.valid, upcoming] if upcoming else survey.valid
    why = dict(reasons(candidates, keep.rules, now, pinned_steps=steps, pins=hand_pins))
    if upcoming:
        del why[upcoming.name]
        if survey.newest:
            why[survey.newest.name] = ("newest", *why[survey.newest.name])
    for candidate in survey.superseded:
        pinned = (hand_pins[candidate.name],) if candidate.name in hand_pins else ()
        why[candidate.name] = pinned if superseded else ("superseded", *pinned)
    why |= dict.fromkeys((*(broken.name for broken in survey.damaged), *survey.unreadable), ("damaged",))
    goes = {name for name, found in why.items() if not found}
    references = _references(survey, goes)
    debris = {name: files for name, files in survey.without_manifest.items() if name.term <= term}
    sizes = {f"{name}/{file}": size for name, files in debris.items() for file, size in files.items()}
    for candidate in (*survey.valid, *survey.superseded):
        if candidate.name in goes:
            own = f"{candidate.name}/"
            sizes |= {path: size for path, size in candidate.files.items() if path.startswith(own)}
    return Plan(
        kept={name: found for name, found in sorted(why.items()) if found},
        goes=tuple(sorted(goes)),
        debris=tuple(name for name in debris if not any(references.hold(f"{name}/{file}") for file in debris[name])),
        bytes=sum(size for path, size in sizes.items() if not references.hold(path)),
    )


class Pruner:
    """Prunes one run again and again. Use it with no save in progress, and on behalf of the run's owner."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._surveyor = Surveyor(storage)
        self._tickets: list[Ticket] = []
        self._spared: set[CheckpointName] = set()
        self._warned = False

    def spare(self, name: CheckpointName) -> None:
        """Never sweep a checkpoint of ours whose manifest may still appear; a later term does."""
        self._spared.add(name)

    def plan(self, keep: Keep, *, superseded: bool = False) -> Plan:
        """What `prune` would do in the newest term; nothing is changed."""
        survey, hand_pins = self._survey(), pins.read_pins(self._storage)
        term = self._tickets[-1].term if self._tickets else 0
        return plan(survey, keep, term=term, now=time.time(), hand_pins=hand_pins, superseded=superseded)

    def prune(self, keep: Keep, *, term: int, superseded: bool = False, upcoming: Candidate | None = None) -> Plan:
        """Delete what the rules do not want, then debris; return what went. Nothing goes once a later term began.

        `upcoming` is a checkpoint for which there was no space: what it would replace goes before it comes.
        """
        if not self._is_ours(term):
            return Plan({})
        survey = self._survey()
        hand_pins = dict.fromkeys(pins.pinned_names(self._storage), "pinned by hand")
        now = time.time()
        decided = plan(survey, keep, term=term, now=now, hand_pins=hand_pins, superseded=superseded, upcoming=upcoming)
        self._warn_of_a_metric_that_is_not_there(keep, survey)
        gone = []
        kept = dict(decided.kept)
        for name in decided.goes:
            # Asked each time: an heir may have gone back to one of those that we would delete.
            if not self._is_ours(term):
                break
            if _retire(self._storage, name):
                gone.append(name)
            else:
                kept[name] = ("pinned by hand",)
        swept, freed = self._sweep(survey, gone, term)
        return Plan(kept=kept, goes=tuple(gone), debris=swept, bytes=freed)

    def sweep(self, *, term: int) -> None:
        """Delete what failed saves left: no manifest names it. That of later terms is not ours to judge."""
        if self._is_ours(term):
            self._sweep(self._survey(), (), term)

    def _survey(self) -> Survey:
        self._tickets = read_tickets(self._storage, self._tickets)
        return self._surveyor.survey(self._tickets)

    def _is_ours(self, term: int) -> bool:
        newest = newest_term(self._storage)
        if newest != term:
            _logger.warning("nothing is pruned: this is term %d, and the run's newest is %d", term, newest)
        return newest == term

    def _sweep(
        self, survey: Survey, gone: Sequence[CheckpointName], term: int
    ) -> tuple[tuple[CheckpointName, ...], int]:
        """Delete the files of `gone` and of failed saves that nothing refers to; return the debris that went, bytes."""
        references = _references(survey, gone)
        debris = {
            name: files
            for name, files in survey.without_manifest.items()
            if name.term <= term and name not in self._spared
        }
        freed = 0
        swept = []
        for name in (*gone, *debris):
            files = debris[name] if name in debris else self._storage.sizes(name.folder)
            loose = [file for file in files if not references.hold(f"{name}/{file}")]
            if files and not loose:
                continue
            if not self._is_ours(term):
                break
            try:
                if len(loose) == len(files):
                    self._storage.delete_folder(name.folder)
                    swept += [name] if name in debris else []
                else:
                    for file in loose:
                        self._storage.delete(f"{name.folder}/{file}")
            except StorageUnusable as error:
                # Something of another's in it must not keep the rest from being swept.
                _logger.warning("what nothing needs any more could not be removed: %s", error)
            else:
                freed += sum(files[file] for file in loose)
        return tuple(swept), freed

    def _warn_of_a_metric_that_is_not_there(self, keep: Keep, survey: Survey) -> None:
        if keep.best is None or survey.newest is None or keep.metric in survey.newest.metrics or self._warned:
            return
        self._warned = True
        known = ", ".join(sorted(survey.newest.metrics)[:12]) or "none"
        text = "keep.best: the checkpoint of step %d has no metric %s, so it cannot be the best; it has: %s"
        _logger.warning(text, survey.newest.step, keep.metric, known)


def _references(survey: Survey, gone: Iterable[CheckpointName]) -> References:
    gone = set(gone)
    candidates = (*survey.valid, *survey.superseded, *survey.damaged)
    return References.of((one for one in candidates if one.name not in gone), survey.unreadable)


def _retire(storage: Storage, name: CheckpointName) -> bool:
    """Take a checkpoint's manifest away, so that it counts no more; false if somebody pinned it meanwhile."""
    if pins.is_pinned(storage, name):
        return False
    try:
        manifest = storage.read(name.manifest)
    except FileNotFoundError:
        return True
    storage.delete(name.manifest)
    if pins.is_pinned(storage, name):
        # Pinned since we looked, and seen whole after that: whoever pinned it was told that it stays.
        storage.create(name.manifest, manifest)
        return False
    return True
