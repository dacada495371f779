"""What holds for every test."""

try:
    from hypothesis import settings
except ImportError:  # environments that hold other tools run some of the tests
    pass
else:
    # An example has no time limit of its own: a busy machine is not a fault.
    settings.register_profile("no deadline", deadline=None)
    settings.load_profile("no deadline")
