"""Run compiled functions as plain Python while tracing, in every thread."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_LOCK = threading.Lock()
_running = 0  # threads and calls inside now
_undo = ExitStack()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run what torch.compile wraps, modules or functions, as plain Python.

    Its stance and the filters of warnings belong to the process: the first thread sets them, the
    last one puts back what was there.
    """
    global _running
    with _LOCK:
        if _running == 0:
            _undo.enter_context(warnings.catch_warnings())
            # a checkpointed part may be traced like any other
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            # else nothing can have been compiled, and to import it takes seconds
            if "torch._dynamo" in sys.modules:
                _undo.enter_context(torch.compiler.set_stance("force_eager"))
        _running += 1
    try:
        yield
    finally:
        with _LOCK:
            _running -= 1
            if _running == 0:
                _undo.close()
