"""One thread and a fixed seed for every test: its numbers must not depend on its neighbours."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
