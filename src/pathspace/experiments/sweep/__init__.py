"""Sweeps: seeds times rates times optimizers, and any other setting, on one page.

`plan` says what is searched, `journal` keeps the trials in Optuna's journal file, `trials` does them by whatever
runner there is, `report` puts them into words and a picture, `command` is what the command line calls. A sweep looks
at the validation split alone, on the seeds that `compare` chooses rates by: what it finds is for `compare` to report.
"""
