"""What several rooms' tests share."""

import pytest
from support.servers import Servers


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    """Storage servers, started when a test first needs one."""
    started = Servers(tmp_path_factory.mktemp("servers"))
    yield started
    started.close()
