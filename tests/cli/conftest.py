"""All verbs are imported before a test puts another function in the place of one of the API."""

from __future__ import annotations

from meshwright.cli.main import find
from meshwright.cli.overview import SUMMARIES

for name in SUMMARIES:
    find(*name.split())
