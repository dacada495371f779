"""What holds for every test."""

import signal
from collections import Counter

import pytest

# A shell starts what runs in the background with SIGINT ignored, and programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from hypothesis import settings
except ImportError:  # environments that hold other tools run some of the tests
    pass
else:
    # An example has no time limit of its own: a busy machine is not a fault.
    settings.register_profile("no deadline", deadline=None)
    settings.load_profile("no deadline")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of what is marked ``by_turns`` every other case is slow, before the slow ones are left out."""
    cases = Counter()
    for item in items:
        if item.get_closest_marker("by_turns"):
            function = item.nodeid.partition("[")[0]
            if cases[function] % 2:
                item.add_marker(pytest.mark.slow)
            cases[function] += 1
