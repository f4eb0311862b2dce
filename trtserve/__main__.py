"""Entry point of the `trtserve` command."""

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from trtserve.cli import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while the command line itself is being imported
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
