"""Pictures of the monitor's page, of runs that are trained for them: `make docs-screens`.

They are no tests: letters look different on other machines.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

FOLDER = Path(__file__).parent / "pictures"
_CHROMIUM = "/usr/bin/chromium"
_MOST_BYTES = 200_000
_RUNS = (("baseline", "0.001"), ("faster", "0.003"), ("too-fast", "0.05"))


def train(folder: Path) -> None:
    """Train a few small runs."""
    for name, rate in _RUNS:
        arguments = ["train", "digits", "-n", "2", "--run-dir", str(folder / name), f"lr={rate}"]
        argv = [sys.executable, "-m", "lockstep", *arguments]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def draw(browser: Browser, url: str) -> None:
    """Draw the list, a run with two others laid over it, and it in the dark on a telephone."""
    page = browser.new_page(viewport={"width": 1280, "height": 330})
    page.goto(url)
    for name, _ in _RUNS:
        page.get_by_label(f"choose {name}").check()
    page.screenshot(path=FOLDER / "monitor_list.png")
    page.set_viewport_size({"width": 1280, "height": 860})
    page.locator("#together").click()
    page.wait_for_selector(".chart canvas")
    page.locator("#curves").scroll_into_view_if_needed()
    page.wait_for_timeout(1500)
    page.screenshot(path=FOLDER / "monitor_run.png")
    page.locator("#timeline").scroll_into_view_if_needed()
    page.evaluate("document.querySelector('#timeline').parentElement.scrollIntoView()")
    page.evaluate("scrollBy(0, -60)")
    page.wait_for_timeout(500)
    page.set_viewport_size({"width": 1280, "height": 700})
    page.screenshot(path=FOLDER / "monitor_ranks.png")
    small = browser.new_page(viewport={"width": 400, "height": 800}, color_scheme="dark")
    small.goto(page.url)
    small.wait_for_selector("#timeline svg")
    small.locator(".chart").first.scroll_into_view_if_needed()
    small.wait_for_timeout(1500)
    small.screenshot(path=FOLDER / "monitor_dark.png")


def main() -> None:
    """Train, serve and draw."""
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name) / "runs"
        train(folder)
        argv = [sys.executable, "-m", "lockstep", "monitor", str(folder), "--web", "--port", "0"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            browser = driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
            draw(browser, url)
            browser.close()
            server.send_signal(signal.SIGTERM)
    for picture in FOLDER.glob("monitor_*.png"):
        if picture.stat().st_size > _MOST_BYTES:
            sys.exit(f"{picture}: is larger than {_MOST_BYTES:,} bytes")


if __name__ == "__main__":
    main()
