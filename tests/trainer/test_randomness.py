"""Seeding covers every stream that the state holds."""

from support.states import assert_same

from trainerd.trainer import randomness, seed_all_rng


def test_two_fresh_starts_with_one_seed_have_the_same_streams():
    """A generator that was forgotten here would make two undisturbed runs differ."""
    seed_all_rng(2**40 + 7)
    first = randomness.capture()
    randomness.random.random(), randomness.np.random.rand(), randomness.torch.rand(1)
    seed_all_rng(2**40 + 7)
    assert_same(randomness.capture(), first)
