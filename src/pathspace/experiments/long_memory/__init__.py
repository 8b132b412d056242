"""Where geometry by step wins: long memory from identity-like starts, PathMuon against its rivals balanced once.

`methods` says how networks are trained, `training` trains one, `protocol` and `cells` say what is done, `comparison`
tests it, `report` and `figure` show it.
"""
