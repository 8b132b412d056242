"""One thread and a fixed seed for every test: neither its neighbours nor the clock may decide on it."""

import gc

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# What is imported and collected stays to the end. Looking for garbage in it took a third of the time of collection.
gc.disable()

# torch's own formats a stack for every kind of device that there might be
if not torch.accelerator.is_available():
    torch.manual_seed = torch.default_generator.manual_seed

# Both go by the clock on the wall, which a busy machine moves too.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")


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
    for name in ("report.files.draw", "report.files.draw_claim", "sweep.report.draw"):
        monkeypatch.setattr(f"pathspace.experiments.{name}", lambda _: (b"", "<svg></svg>"))
