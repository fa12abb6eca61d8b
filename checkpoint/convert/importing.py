"""Begin a run with a checkpoint that another program wrote."""

from dataclasses import dataclass

from trainerd.checkpoint import terms
from trainerd.checkpoint.convert.errors import NotConverted
from trainerd.checkpoint.convert.places import foreign_names
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.storage import Storage

_SPARE_BYTES = 2**30


@dataclass(frozen=True)
class Imported:
    """The checkpoint that was made: `kind` of the source, what it carries over, and the names kept under `imported`."""

    kind: str
    step: int
    term: int
    bytes: int
    carried: tuple[str, ...]
    kept: tuple[str, ...]
    notes: tuple[str, ...]


def import_checkpoint(source: str, storage: Storage, *, step: int | None = None) -> Imported:
    """Commit the state of a checkpoint of another program as the first checkpoint of a new run.

    Args:
        source: a .pth of detectron2 or fvcore or the folder with its `last_checkpoint`, a torch.save file, a .ckpt of
            Lightning, a .safetensors file, a folder of Hugging Face's Trainer or of torch.distributed.checkpoint.
        storage: a run that holds nothing yet.
        step: completed iterations; as the source tells when left out, and 0 if it does not.

    Nothing in the source is executed. NotConverted, UnsupportedState, StorageUnusable, RunOwned: nothing was made.
    """
    from trainerd.checkpoint.codec import encode
    from trainerd.checkpoint.convert.mapping import to_state
    from trainerd.checkpoint.convert.sources import read_source, source_bytes
    from trainerd.checkpoint.store import CheckpointStore

    _refuse_used(storage)
    parts = read_source(source)
    told = parts.step if step is None else step
    mapped = to_state(parts, told or 0)
    notes = list(mapped.notes)
    if told is None:
        notes.append("the source tells no step, so this is step 0; --step says another")
    store = CheckpointStore(storage)
    _refuse_inflated(sum(leaf.bytes for leaf in encode(mapped.state)[1].values()), source_bytes(source), source)
    store.check(mapped.state)
    owner = RunOwner.acquire(storage)
    try:
        _refuse_used(storage)
        store.term = owner.ensure_term(0)
        saved = store.save(told or 0, mapped.state)
    finally:
        owner.release()
    return Imported(parts.kind, saved.step, saved.term, saved.bytes, mapped.carried, mapped.kept, tuple(notes))


def _refuse_used(storage: Storage) -> None:
    if foreign := foreign_names(storage):
        raise NotConverted(f"{storage.url} holds other files ({foreign}): name a new folder.")
    if terms.committed(storage) or terms.committed_once(storage):
        raise NotConverted(f"{storage.url} holds a run already; it was left as it is. Name a new folder.")


def _refuse_inflated(needed: int, there: int, source: str) -> None:
    # A file of a few bytes can describe one number that stands for a million million elements.
    if needed > 2 * there + _SPARE_BYTES:
        raise NotConverted(f"{source} has {there} bytes, but its tensors would take {needed}: it was not imported.")
