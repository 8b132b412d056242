"""One report for every command: a table, figures, a page to pass on, and all numbers as CSV and JSON."""

from pathspace.experiments.report.claim import claim_table
from pathspace.experiments.report.conclusion import conclusion
from pathspace.experiments.report.files import write_parts, write_report
from pathspace.experiments.report.table import Published, Table, build_table, print_table

__all__ = [
    "Published",
    "Table",
    "build_table",
    "claim_table",
    "conclusion",
    "print_table",
    "write_parts",
    "write_report",
]
