"""Metrics of several ranks, gathered by real processes over gloo."""

import multiprocessing
import socket

from support.ranks import rank_main

from trainerd.trainer import comm


def test_the_slowest_ranks_data_time_goes_unseen() -> None:
    """The main process has the mean of the losses and the longest data_time; others have nothing, late or not."""
    context = multiprocessing.get_context("forkserver")
    for late in (False, True):
        answers = context.Queue()
        port = free_port()
        ranks = [context.Process(target=rank_main, args=(rank, port, late, answers)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        got = {answer[0]: answer[1:] for answer in (answers.get(timeout=120) for _ in ranks)}
        for process in ranks:
            process.join(60)
            assert process.exitcode == 0
        streams = [answer[-1] for answer in (got[0], got[1])]
        assert sorted(index for stream in streams for index in stream) == [0, 1, 2, 3, 4, 5]
        assert got[0][:-1] == (
            0,
            2,
            True,
            {
                "data_time": [(1.5, 0), (1.5, 1), (1.5, 2)],
                "total_loss": [(3.5, 0), (3.5, 1), (3.5, 2)],
                "a": [(1.5, 0), (1.5, 1), (1.5, 2)],
                "b": [(2.0, 0), (2.0, 1), (2.0, 2)],
            },
            [0, 10],
        )
        assert got[1][:-1] == (1, 2, False, {}, [])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_program_without_ranks_is_its_own_main_process() -> None:
    """Nothing has to be initialised."""
    assert (comm.get_rank(), comm.get_world_size(), comm.is_main_process()) == (0, 1, True)
    assert comm.gather({"a": 1}) == [{"a": 1}]
