"""The table of O13 for symbol sequences: baselines, and three networks in three metrics, on three texts.

It has an engine of its own, because its models are no torch modules: `protocol` says what is done,
`cells` does it, `report` puts it into words and a picture.
"""
