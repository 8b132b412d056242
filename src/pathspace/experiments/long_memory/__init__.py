"""Where geometry by step wins: long memory from identity-like starts, PathMuon against its rivals balanced once.

It has an engine of its own, because its runs are many and small: `copies` computes networks from many seeds at once,
`rules` and `training` train them, `protocol` and `cells` say what is done, `comparison` tests it, `report` and `figure`
show it, `command` is what the command line calls.
"""
