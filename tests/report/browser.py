"""Pages as headless Chromium lays them out; the tests that need it skip where it is missing."""

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
    """The title that a page has when its scripts have run; `folder` is one for scratch files of this call alone."""
    folder.mkdir(parents=True)
    (folder / "page.html").write_text(page)
    command = [BROWSER, *OPTIONS, f"--user-data-dir={folder / 'user'}", "--dump-dom"]
    done = subprocess.run(
        [*command, (folder / "page.html").as_uri()], capture_output=True, text=True, check=True
    )
    return html.unescape(re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)[1])


def sticking_out(page: str, widths: Sequence[int], folder: Path) -> list[tuple[int, list[str]]]:
    """At each width in pixels: by how many the page scrolls sideways, and what stands outside it, except in boxes that scroll."""
    # A window of Chromium is never narrower than 500 pixels; a frame is.
    frames = "".join(
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(page)}"></iframe>'
        for width in widths
    )
    return json.loads(title_of(FRAMES % frames, folder))
