"""One report for every command: a table, figures, a page to pass on, and all numbers as CSV and JSON."""

from pathspace.experiments.report.claim import claim_table
from pathspace.experiments.report.conclusion import conclusion
from pathspace.experiments.report.files import write_parts, write_report
from pathspace.experiments.report.pairs import pairs_of, pairs_table
from pathspace.experiments.report.table import Table, build_table, print_table

__all__ = [
    "Table",
    "build_table",
    "claim_table",
    "conclusion",
    "pairs_of",
    "pairs_table",
    "print_table",
    "write_parts",
    "write_report",
]
