"""Compiled functions where there is no folder to keep their code in."""

import pytest

from pathspace.sequences.kernels import machine_code


def test_a_function_whose_code_can_be_kept_nowhere_is_compiled_for_the_process():
    names = {"njit": machine_code.njit}
    source = "@njit(error_model='numpy', cache=True)\ndef double(x):\n    return 2 * x"
    machine_code._say_so.cache_clear()
    with pytest.warns(RuntimeWarning, match="set NUMBA_CACHE_DIR to a folder that may be written"):
        exec(source, names)  # a function without a file, beside which Numba keeps its code
    exec(source, names)  # told once
    assert names["double"](3) == 6
