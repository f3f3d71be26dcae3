"""``python -m hetero``: the same as the console script ``hetero``."""

from hetero.cli import main

if __name__ == "__main__":
    main()
