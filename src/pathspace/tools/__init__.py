"""What the command line and symbol sequences share: whole files, progress, processes. The core imports none of it."""
