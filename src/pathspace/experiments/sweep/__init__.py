"""Sweeps: seeds times rates times optimizers, and any other setting, on one page.

`plan` says what is searched, `trials` lets Optuna draw points and does their runs, `report` puts
them into words and a picture, `command` is what the command line calls. A sweep looks at the
validation split alone, on the seeds that `compare` chooses rates by: what it finds is for `compare`
to report.
"""
