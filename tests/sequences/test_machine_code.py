"""Compiled functions where there is no folder to keep their code in, or where what was kept is damaged."""

import os
import pickle
import subprocess
import sys

import pytest
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target

from pathspace.nn.kernels import compiled as nn_compiled
from pathspace.sequences.baselines import context_tree, hidden_markov
from pathspace.sequences.kernels import (
    coding,
    contexts,
    elementary,
    machine_code,
    mixing,
    mixing_3,
    output,
    solve,
    walk,
)
from pathspace.sequences.kernels import compiled as sequences_compiled


def test_a_function_whose_code_can_be_kept_nowhere_is_compiled_for_the_process():
    names = {"njit": machine_code.njit}
    source = "@njit(error_model='numpy', cache=True)\ndef double(x):\n    return 2 * x"
    machine_code._say_so.cache_clear()
    with pytest.warns(RuntimeWarning, match="set NUMBA_CACHE_DIR to a folder that may be written"):
        exec(source, names)  # a function without a file, beside which Numba keeps its code
    exec(source, names)  # told once
    assert names["double"](3) == 6


DAMAGE = """
import importlib, math, sys
from pathlib import Path
from pathspace.sequences.kernels import elementary

def hits():
    # a new function, which knows the files of the one before
    power = importlib.reload(elementary)._power_and_expm1
    scale, rest = power(2.5)
    assert math.isclose(scale * (1 + rest), math.exp(2.5))
    return sum(power.stats.cache_hits.values())

assert (hits(), hits()) == (0, 1)
for suffix in (".nbi", ".nbc"):
    for damage in ("truncated", "empty", "garbage"):
        file, = Path(sys.argv[1]).rglob(f"*{suffix}")
        content = file.read_bytes()
        changed = {"truncated": content[: 2 * len(content) // 3], "empty": b"", "garbage": b"garbage" * 99}
        file.write_bytes(changed[damage])
        assert (hits(), hits()) == (0, 1), (suffix, damage)
"""


@pytest.mark.slow
def test_compiled_code_that_is_damaged_on_disk_is_compiled_anew(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", DAMAGE, str(tmp_path)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def kept_functions():
    kernels = [
        coding,
        contexts,
        sequences_compiled,
        elementary,
        mixing,
        mixing_3,
        output,
        solve,
        walk,
    ]
    modules = [*kernels, context_tree, hidden_markov, nn_compiled]
    found = {
        function for module in modules for function in vars(module).values() if is_kept(function)
    }
    assert len(found) > 30
    assert {nn_compiled.forward, nn_compiled.backward} <= found
    return found


def is_kept(function):
    return isinstance(getattr(function, "_cache", None), FunctionCache)


def test_every_function_whose_code_is_kept_survives_damage(monkeypatch):
    def damaged(*_):
        raise pickle.UnpicklingError("invalid load key")

    monkeypatch.setattr(FunctionCache, "_load_overload", damaged)
    monkeypatch.setattr(FunctionCache, "_save_overload", damaged)
    emptied = []
    monkeypatch.setattr(FunctionCache, "flush", lambda kept: emptied.append(kept))
    for function in kept_functions():
        emptied.clear()
        assert function._cache.load_overload((), cpu_target.target_context) is None
        assert function._cache.save_overload((), None) is None
        assert emptied == [function._cache] * 2


class Kept:
    """A compiled function whose code on disk is what is said; None: it cannot be read."""

    def __init__(self, signatures, index):
        self.signatures, self._index = signatures, index
        self._cache = self._cache_file = self

    def _load_index(self):
        if self._index is None:
            raise OSError("no such file")
        return self._index


def test_compiled_code_is_known_in_memory_and_on_disk():
    assert machine_code.is_compiled(Kept([(float,)], None))
    assert machine_code.is_compiled(Kept([], {"signature": "file"}))
    assert not machine_code.is_compiled(Kept([], {}))
    assert not machine_code.is_compiled(Kept([], None))
    mixing.combine(1, 2)
    assert machine_code.is_compiled(mixing.combine)
    # what Numba itself says of its files
    assert isinstance(mixing.combine._cache._cache_file._load_index(), dict)
