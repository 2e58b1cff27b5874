"""`python -m kgen`: the same as the command `kgen`."""

from kgen.cli import main

if __name__ == "__main__":
    main()
