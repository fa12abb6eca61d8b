"""docs/storage.md against the code."""

import pathlib
import re

from trainerd.checkpoint import guarantees, storage
from trainerd.checkpoint.patience import Patience

TEXT = (pathlib.Path(__file__).parents[2] / "docs/storage.md").read_text()
ALL = [
    guarantees.LOCAL,
    guarantees.S3,
    guarantees.GCS,
    guarantees.AZURE,
    guarantees.SFTP,
    guarantees.MEMORY,
]


def rows(first_cell):
    """The table whose first row begins so."""
    lines = TEXT[TEXT.index(first_cell) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_guarantees_is_what_the_code_counts_on():
    """Column by column."""
    head, _, *lines = rows("| | local disk")
    assert head[1:] == [kept.backend for kept in ALL]
    said = {line[0]: line[1:] for line in lines}

    def words(attribute):
        return ["yes" if getattr(kept, attribute) else "no" for kept in ALL]

    assert said["of several that create one name, exactly one succeeds"] == words("exclusive_create")
    assert said["a lock that the kernel frees tells who owns a run"] == words("life_lock")
    assert said["other processes see what was written"] == words("shared")
    assert said["folders exist by themselves"] == words("folders")
    assert said["a data file holds at most"] == [f"{kept.file_bytes >> 20} MiB" for kept in ALL]
    assert said["transfers at once"] == [str(kept.parallel) for kept in ALL]


def test_every_scheme_is_in_the_table_of_urls():
    """With the extra that brings its package."""
    urls = {name: line for line in rows("| URL") for name in re.findall(r"(\w+)://", line[0])}
    for scheme, backend in storage._BACKENDS.items():
        assert urls[scheme][1].startswith(backend.guarantees.backend)
        if backend.guarantees.shared:
            assert urls[scheme][2] == f"`trainerd[{backend.extra}]`"
    assert set(storage._OTHER_NAMES) - {"s3a"} <= set(urls)


def test_the_patience_is_the_one_told():
    """Seconds, bytes and tries."""
    patience = Patience()
    assert (
        f"{patience.request_seconds:.0f} s and what its bytes take at {patience.slowest_bytes_per_second // 1024} KiB/s"
        in (" ".join(TEXT.split()))
    )
    assert patience.tries == 5
    assert "up to five times" in TEXT
