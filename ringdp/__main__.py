"""`python -m ringdp`: the command, also where no script of it is on the path."""

from ringdp.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
