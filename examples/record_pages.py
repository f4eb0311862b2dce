"""Take the pictures of the chat page and of a report from a real run of the demo: `make recording`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = ("What is ML?", "What is a KV cache?", "What is a tokenizer?")
SOURCES = {
    "page": ("trtserve/gateway/page/index.html", "trtserve/gateway/page/markdown.js"),
    "report": ("trtserve/bench/report.py", "trtserve/bench/plots.py", "trtserve/bench/plots.css"),
}
"""What each picture shows is written in these files."""
DIGESTS = "pictures.json"


def digests() -> dict[str, str]:
    """Return the SHA-256 of the sources of each picture, as the pictures' folder keeps it in `pictures.json`."""
    return {
        name: hashlib.sha256(b"".join((ROOT / each).read_bytes() for each in files)).hexdigest()
        for name, files in SOURCES.items()
    }


def converse(page: Page, address: str) -> None:
    """Ask the questions on the page, and wait for each answer."""
    page.goto(address)
    page.wait_for_function("document.querySelector('#model').value !== ''")
    for number, question in enumerate(QUESTIONS, 1):
        page.keyboard.type(question)
        page.keyboard.press("Enter")
        page.wait_for_function(f"document.querySelectorAll('.assistant .words').length === {number}")
        page.wait_for_function("!document.querySelector('#send').hidden")
    page.wait_for_timeout(2500)  # the panel asks the server every second


def take(folder: Path, environment: dict[str, str], work: Path) -> None:
    """Serve the demo, talk to it on the page, measure it, and write the pictures into `folder`."""
    from playwright.sync_api import sync_playwright

    def trtserve(*arguments: str) -> str:
        return subprocess.run(
            ["trtserve", *arguments], env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    trtserve("import", "demo")
    trtserve("start", "--ui", "--detach", "--auto-ports")
    try:
        (status,) = json.loads(trtserve("status", "--json"))["result"]
        address = "http://{host}:{http_port}/".format_map(status["server"])
        report = work / "report.html"
        trtserve("bench", "token-norm-dist", "--html", str(report))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"),
                args=["--no-sandbox", "--disable-dev-shm-usage"],
            )
            for name, width, height in (("page", 1100, 640), ("page-narrow", 380, 720)):
                touch = name == "page-narrow"
                page = browser.new_page(viewport={"width": width, "height": height}, bypass_csp=True, has_touch=touch)
                converse(page, address)
                page.screenshot(path=folder / f"{name}.png")
            page = browser.new_page(viewport={"width": 1100, "height": 900})
            page.goto(report.as_uri())
            page.wait_for_selector("svg, canvas")
            page.wait_for_timeout(2000)  # the plots draw themselves
            page.screenshot(path=folder / "report.png")
            browser.close()
    finally:
        trtserve("stop")


def main() -> int:
    """Take the pictures, and note what they were taken of."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        take(arguments.folder, {**os.environ, "TRTSERVE_HOME": store}, Path(store))
    (arguments.folder / DIGESTS).write_text(json.dumps(digests(), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
