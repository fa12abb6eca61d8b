"""What several rooms' tests share."""

import signal

import pytest
from support.servers import Servers

# Who is started in the background ignores SIGINT, and so would every process that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    """Storage servers, started when a test first needs one."""
    started = Servers(tmp_path_factory.mktemp("servers"))
    yield started
    started.close()
