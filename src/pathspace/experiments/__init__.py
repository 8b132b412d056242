"""Experiments on real data: tasks, models, methods, one engine, one report.

Everything here may import the rest of the library; nothing in the rest of the library imports this
package. Adding something is one file and one line in its registry: `tasks`, `models.MODELS`,
`methods.GROUPS`, `recipes/NAME.toml`.

A function raises `errors.ConfigurationError` where what was asked for cannot be done. So docstrings
name only other errors.
"""
