"""`python -m service` is `polyhead`."""

from service.cli import main

if __name__ == "__main__":
    main()
