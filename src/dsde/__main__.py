"""`python -m dsde` is the `dsde` command."""

from dsde.cli import main

if __name__ == "__main__":
    main()
