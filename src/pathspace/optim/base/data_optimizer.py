"""The part of optimizers with a data-dependent metric: batches given by hand."""

from __future__ import annotations

from typing import Any

from pathspace.metrics import DataDependent


class DataOptimizer:
    """Mixed into an optimizer whose metric is data-dependent."""

    metric: DataDependent

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Give the batch for the next refresh of the metric, instead of the one that the model was last called with.

        Args:
            args: what the model is called with.
            kwargs: likewise.
        """
        self.metric.observe(*args, **kwargs)

    def close(self) -> None:
        """Remove the hook by which the metric sees batches; from then on they come by :meth:`observe` alone."""
        self.metric.close()
