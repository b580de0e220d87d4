"""Render pages in headless Chromium; tests that need it are skipped if it is missing."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
FRAMES = """<body>%s<script>
onload = () => document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
  const page = frame.contentDocument, width = page.documentElement.clientWidth;
  const scrolls = part => part !== page.body && part !== page.documentElement && part &&
    (frame.contentWindow.getComputedStyle(part).overflowX !== "visible" || scrolls(part.parentElement));
  const wide = [...page.body.querySelectorAll("*")].filter(part => {
    const box = part.getBoundingClientRect();
    return box.width && (box.right > width + 1 || box.left < -1) && !scrolls(part.parentElement);
  });
  return [page.documentElement.scrollWidth - width, wide.map(part => part.outerHTML.slice(0, 80))];
}));
</script></body>"""


def title_of(page: str, folder: Path) -> str:
    """Return the title of a page after its scripts have run; `folder` is an empty folder for temporary files."""
    folder.mkdir(parents=True)
    (folder / "page.html").write_text(page)
    command = [BROWSER, *OPTIONS, f"--user-data-dir={folder / 'user'}", "--dump-dom"]
    done = subprocess.run(
        [*command, (folder / "page.html").as_uri()], capture_output=True, text=True, check=True
    )
    return html.unescape(re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)[1])


def sticking_out(page: str, widths: Sequence[int], folder: Path) -> list[tuple[int, list[str]]]:
    """Return for each width in pixels how far the page scrolls sideways, and the elements outside it, except in scroll boxes."""
    # A window of Chromium is at least 500 pixels wide; a frame can be narrower.
    frames = "".join(
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(page)}"></iframe>'
        for width in widths
    )
    return json.loads(title_of(FRAMES % frames, folder))
