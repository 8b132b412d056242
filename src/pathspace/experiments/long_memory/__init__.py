"""Long memory from identity-like starts, where PathMuon is ahead of its rivals balanced once.

`methods` says how networks are trained, `training` trains one, `protocol` says what is done,
`cells` does and tests it, `report` shows it.
"""

from pathspace.experiments.long_memory.cells import fill as fill
from pathspace.experiments.long_memory.protocol import NEEDS as NEEDS
from pathspace.experiments.long_memory.protocol import Protocol as Protocol
from pathspace.experiments.long_memory.report import sections_of as sections_of
