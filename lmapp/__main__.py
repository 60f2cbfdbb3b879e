"""`python -m lmapp` is the command `lmapp`."""

from lmapp.cli import main

if __name__ == "__main__":
    main()
