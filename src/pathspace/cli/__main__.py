"""``python -m pathspace.cli`` is the command ``pathspace``."""

from pathspace.cli import main

if __name__ == "__main__":
    main()
