"""Pictures of the site's home: the pages that runs, plans and timelines make, in light and dark.

Run as `python tools/site_pictures.py RUN` from the repository's root, with the folder of a run such
as the tour's. It makes a plan and a timeline, and writes what headless Chromium shows of each page's
top to docs/pictures/NAME.png and NAME-dark.png. It needs `chromium` and the package `pillow`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURES = Path("docs/pictures")
# What the pages are made of, without `--out`; the plan's command is that of docs/index.md.
COMMANDS = {
    "plan": "plan llama3-8b --cluster h100-sxm --gpus 8 --seq-len 8192 --batch-tokens 1M",
    "timeline": "simulate --model.preset llama3-70b --layout.pp 8 --layout.schedule zb-v "
    "--layout.micro_batch 1 --data.seq_len 8192 --train.batch_tokens 131072",
}
WIDTH, HEIGHT = 1000, 640
COLOURS = 64
SCHEMES = {"": 1, "-dark": 0}
"""Ends of the files' names, and the value of Chromium's preferredColorScheme for each."""


def picture(browser: str, page: Path, scheme: int, to: Path) -> None:
    """Write a PNG of few colours of the top of a page."""
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += [f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={WIDTH},{HEIGHT}"]
    subprocess.run(
        [*words, f"--screenshot={to}", page.resolve().as_uri()], check=True, stderr=subprocess.DEVNULL
    )
    with Image.open(to) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(to, optimize=True)


def main() -> int:
    """Write all pictures and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run, with its report.html")
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium", help="the browser")
    arguments = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pages = {"report": arguments.run / "report.html"}
        for name, command in COMMANDS.items():
            pages[name] = Path(folder, f"{name}.html")
            words = [sys.executable, "-m", "meshwright", *command.split(), "--out", str(pages[name])]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        for name, page in pages.items():
            for end, scheme in SCHEMES.items():
                picture(arguments.chromium, page, scheme, PICTURES / f"{name}{end}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
