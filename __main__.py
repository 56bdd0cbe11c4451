"""`python -m fp4dse`: the command, where its script is not on the PATH."""

from fp4dse.cli import main

if __name__ == "__main__":
    main()
