"""``python -m mezzo`` is ``mezzo``."""

from mezzo.cli import main

if __name__ == "__main__":
    main()
