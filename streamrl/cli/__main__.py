"""`python -m streamrl.cli` is the command `streamrl`."""

from streamrl.cli import main

if __name__ == "__main__":
    main()
