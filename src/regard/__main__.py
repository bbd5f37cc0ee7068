"""``python -m regard`` is the command ``regard``."""

from regard.cli import main

if __name__ == "__main__":
    main()
