"""`python -m meshwright` is the command `meshwright`."""

from meshwright.cli.entry import run

if __name__ == "__main__":
    run()
