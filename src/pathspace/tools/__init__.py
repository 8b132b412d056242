"""Tools of the command line and of symbol sequences: atomic files, progress, processes. The core imports none."""
