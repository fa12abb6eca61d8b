"""Metrics: what is put comes back, smoothed or not, and memory stays bounded."""

import pytest
import torch
from support.trainers import assert_same, through_a_file

from trainerd.trainer.events import KEPT_VALUES, EventStorage, HistoryBuffer, get_event_storage


def test_history_grows_without_bound() -> None:
    """Only the newest values are kept, and the global average counts them all."""
    history = HistoryBuffer(max_length=10)
    for number in range(1, 1001):
        history.update(float(number), number)
        assert len(history._values) < 20
    assert history.values() == [(float(n), n) for n in range(991, 1001)]
    assert history.latest() == 1000
    assert history.median(3) == 999
    assert history.median(100) == 995.5
    assert history.avg(2) == 999.5
    assert history.global_avg() == 500.5


def test_a_restored_history_differs() -> None:
    """A storage comes back from its state in every value, also those that are no longer kept."""
    storage = EventStorage()
    for iteration in range(KEPT_VALUES + 300):
        storage.iter = iteration
        storage.put_scalar("loss", iteration / 3)
        storage.put_scalars(lr=0.1, smoothing_hint=False)
    other = EventStorage()
    other.load_state_dict(through_a_file(storage.state_dict()))
    for each in (storage, other):
        each.put_scalar("loss", 1 / 7, cur_iter=5000)
    assert_same(other.state_dict(), storage.state_dict())
    assert other.history("loss").values() == storage.history("loss").values()
    assert other.history("loss").global_avg() == storage.history("loss").global_avg()
    saved = storage.state_dict()["histories"]["loss"]
    assert (saved["values"].dtype, saved["iterations"].dtype) == (torch.float64, torch.int64)
    assert len(saved["values"]) == KEPT_VALUES
    assert saved["count"] == KEPT_VALUES + 301


def test_noisy_scalars_are_shown_raw() -> None:
    """Scalars whose hint says noisy are shown as a median, others as they are; a hint may not change."""
    storage = EventStorage(5)
    for value in (1.0, 9.0, 2.0):
        storage.put_scalar("loss", torch.tensor(value))
        storage.put_scalar("lr", value, smoothing_hint=False)
    assert storage.latest() == {"loss": (2.0, 5), "lr": (2.0, 5)}
    assert storage.latest_with_smoothing_hint(3) == {"loss": (2.0, 5), "lr": (2.0, 5)}
    assert storage.latest_with_smoothing_hint(2) == {"loss": (5.5, 5), "lr": (2.0, 5)}
    assert storage.smoothing_hints() == {"loss": True, "lr": False}
    with pytest.raises(AssertionError, match="smoothing_hint=False before"):
        storage.put_scalar("lr", 1.0)
    assert len(storage.history("lr").values()) == 3


def test_the_innermost_storage_is_not_found() -> None:
    """get_event_storage finds the innermost open storage, and says so when there is none."""
    with pytest.raises(AssertionError, match="while a trainer trains"):
        get_event_storage()
    with EventStorage() as outer:
        with EventStorage() as inner:
            assert get_event_storage() is inner
        assert get_event_storage() is outer
    with pytest.raises(AssertionError):
        get_event_storage()


def test_a_scope_outlives_its_block() -> None:
    """Names are put under the scope inside the block only, also when it fails."""
    storage = EventStorage()
    with pytest.raises(TypeError), storage.name_scope("eval/"):
        storage.put_scalars(loss=1, accuracy=None)
    storage.put_scalar("loss", 2)
    storage.step()
    storage.put_scalar("loss", 3, cur_iter=7)
    assert storage.latest() == {"eval/loss": (1.0, 0), "loss": (3.0, 7)}
    assert (storage.iter, storage.iteration) == (1, 1)
    with pytest.raises(KeyError, match=r"no scalar named 'other'.*eval/loss, loss"):
        storage.history("other")


def test_images_pile_up_without_a_writer() -> None:
    """Images and histograms wait for a writer, the newest ones only, until it clears them."""
    storage = EventStorage()
    for iteration in range(2000):
        storage.iter = iteration
        storage.put_image("sample", torch.zeros(3, 1, 1))
    storage.put_histogram("weights", torch.arange(10).view(2, 5), bins=5)
    assert len(storage.images) == 100
    assert storage.images[-1][::2] == ("sample", 1999)
    histogram = storage.histograms[0]
    assert (histogram["min"], histogram["max"], histogram["num"], histogram["sum"]) == (0, 9, 10, 45)
    assert histogram["bucket_counts"] == [2, 2, 2, 2, 2]
    storage.clear_images()
    storage.clear_histograms()
    assert storage.images == []
    assert storage.histograms == []
