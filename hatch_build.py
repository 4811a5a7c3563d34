"""Build hook of hatchling: wheels and sdists that are built in a checkout say which commit they are of."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    """Adds the file that `meshwright.version` reads; nothing is written into the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # its commit is the checkout's, which changes
            return
        module = runpy.run_path(str(Path(self.root, "src", "meshwright", "version.py")))
        packed = Path(self.root, "src", "meshwright", module["COMMIT"]).is_file()  # an sdist has it already
        if packed or (commit := module["commit"]()) is None:
            return
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name, module["COMMIT"])
        file.write_text(f"{commit}\n", encoding="ascii")
        folder = "src/meshwright" if self.target_name == "sdist" else "meshwright"
        build_data["force_include"][str(file)] = f"{folder}/{file.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()
