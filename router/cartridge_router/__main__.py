"""Entry of the `cartridge-router` command."""

import sys

from cartridge_router.cli import run


def main() -> None:
    """Run the command line and exit with its status."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
