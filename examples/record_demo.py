"""Record examples/demo.sh in a terminal and draw what it printed as an SVG: `make recording`."""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100
DEMO = Path(__file__).parent / "demo.sh"
TITLE = "trtserve: from a checkpoint to a measured endpoint (shortened)"
# Rows of the benchmark that are shown, and how other lines begin that are left out.
FIGURES = ("Requests/Sec", "OP tokens/sec", "Avg. latency", "P99 latency", "Avg. TTFT", "Avg. inter", "Failed")
DETAILS = (
    *("Writing", "Next:"),
    *("  Triton", "  try"),
    *("Sending", "note:", "Stopping"),
)


def record(command: list[str], environment: dict[str, str]) -> bytes:
    """Run a command in a terminal of its own and return all that it printed there."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 200, COLUMNS, 0, 0))
    printed = bytearray()
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment) as process:
        os.close(follower)
        while chunk := _read(leader):
            printed += chunk
            sys.stderr.buffer.write(chunk)
            sys.stderr.flush()
    os.close(leader)
    if process.returncode:
        raise SystemExit(process.returncode)
    return bytes(printed)


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 65536)
    except OSError:  # Linux reports the end of a terminal as an error
        return b""


def screen(printed: str) -> list[str]:
    """Return the lines that stay on the screen, with their colours: progress that was drawn over is left out."""
    lines = [""]
    row = 0
    for part in re.split(r"(\r\n|\n|\r|\x1b\[\d*A|\x1b\[\d*K|\x1b\[\?25[lh])", printed):
        if part in ("\n", "\r\n"):
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r" or part.endswith("K"):
            lines[row] = ""  # what follows is drawn over the line
        elif part.endswith("A") and part.startswith("\x1b["):
            row = max(0, row - int(part[2:-1] or 1))
        elif not part.startswith("\x1b[?25"):
            lines[row] += part
    return lines


def shorten(lines: list[str]) -> list[str]:
    """Leave out lines that begin as one of DETAILS, and rows of the benchmark that are not in FIGURES."""
    kept = []
    dropped = False
    for line in lines:
        plain = Text.from_ansi(line).plain
        lesser_figure = plain.startswith("│ ") and not plain[2:].startswith(FIGURES)
        # A long line goes on in the next one, with an indent.
        lesser = lesser_figure or plain.startswith(DETAILS)
        dropped = (lesser and not plain.startswith("  ")) or (dropped and plain.startswith("  "))
        if not (lesser or dropped):
            kept.append(line)
    return kept[1:] if kept[0] == "" else kept


def draw(lines: list[str]) -> str:
    """Return an SVG of the lines, commands in bold."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in lines:
        text = Text.from_ansi(line)
        if text.plain.startswith("$ "):
            text.stylize("bold green", 0, 1)
            text.stylize("bold white", 2)
        console.print(text)
    # A picture in a page may load no fonts: the reader's own monospace font is used.
    return re.sub(r"\s*@font-face \{.*?\}", "", console.export_svg(title=TITLE), flags=re.DOTALL)


def main() -> int:
    """Record a run and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        environment = {**os.environ, "TRTSERVE_HOME": store, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
        printed = record(["bash", str(DEMO)], environment).decode()
    lines = shorten(screen(printed.replace(store, ".demo")))
    arguments.picture.write_text(draw(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
