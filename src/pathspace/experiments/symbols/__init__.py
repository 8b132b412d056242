"""The table of O13 for symbol sequences: baselines, and three networks in three metrics, on three texts."""

from pathspace.experiments.symbols.cells import fill as fill
from pathspace.experiments.symbols.protocol import NEEDS as NEEDS
from pathspace.experiments.symbols.protocol import Protocol as Protocol
from pathspace.experiments.symbols.report import sections_of as sections_of
