"""The examples of the documentation strings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest

from pathspace import sequences

MODULES = [
    module.name for module in pkgutil.walk_packages(sequences.__path__, "pathspace.sequences.")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_public_names_are_explained():
    for name in sequences.__all__:
        assert getattr(sequences, name).__doc__, name
