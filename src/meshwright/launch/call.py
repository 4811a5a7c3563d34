"""The program of a rank: `python -m meshwright.launch.call CALL RESULT`.

CALL is a file with a pickled function without arguments, which the launcher has written. Every rank calls it,
and the first leaves what it returns in the file RESULT.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from meshwright.rank.child import set_up_output
from meshwright.rank.env import worker


def main() -> None:
    """Make the call as one of the ranks."""
    set_up_output()
    call, result = map(Path, sys.argv[1:])
    found = pickle.loads(call.read_bytes())()
    if (place := worker()) is None or place.rank == 0:
        result.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
