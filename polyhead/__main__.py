"""`python -m polyhead` is `polyhead`."""

from polyhead.service.cli.main import main

if __name__ == "__main__":
    main()
