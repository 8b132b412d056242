"""Where geometry by step wins: long memory from identity-like starts, PathMuon against its rivals balanced once.

`methods` says how networks are trained, `training` trains one, `protocol` says what is done,
`cells` does and tests it, `report` shows it.
"""
