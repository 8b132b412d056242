"""One thread and a fixed seed for every test: neither its neighbours nor the clock may decide on it."""

import functools
import gc
import signal
import zlib
from collections import defaultdict

import pytest
import torch
import typer.main
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# A shell script ignores Ctrl-C in what it starts in the background, so a test there could not be
# interrupted by its own signal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What is imported and collected stays to the end. Looking for garbage in it took a third of the
# time of collection.
gc.disable()

# torch's own formats a stack for every kind of device that there might be
if not torch.accelerator.is_available():
    torch.manual_seed = torch.default_generator.manual_seed

# The command line is called hundreds of times, and made of the annotations of all its commands at
# each of them.
typer.main.get_command = functools.cache(typer.main.get_command)

# Both go by the clock on the wall, which a busy machine moves too.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Of a test marked `sample(n)`, all but n cases are slow, unless one of them is asked for by its name.

    They are those whose names come first in an order that has nothing to do with what they say, so
    that each test has others, and a new case moves none but the last. `each` is a function of a
    case's parameters: one of each value at least.
    """
    if any("[" in argument for argument in config.args):
        return
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for possible in cases.values():
        marker = possible[0].get_closest_marker("sample")
        possible.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        if "each" in marker.kwargs:
            first = {
                marker.kwargs["each"](**item.callspec.params): item for item in reversed(possible)
            }
            possible.sort(key=lambda item: item not in first.values())
            count = max(len(first), *marker.args)
        else:
            (count,) = marker.args
        for item in possible[count:]:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """No collection of garbage looks at what is there by now."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def no_pictures(monkeypatch):
    """Pictures take a second each; the tests of the reports draw them."""
    monkeypatch.setattr("pathspace.experiments.report.saved", lambda _: (b"", "<svg></svg>"))
