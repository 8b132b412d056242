"""One report for every command: its tables, figures and numbers on a terminal, a page, as CSV and as JSON."""
