"""Take pictures of every page: `python docs/generators/screenshots.py` for docs/, with a folder as argument to look at.

The pages are those of a stack of its own with API keys, the demo model, some jobs, failures and a batch. docs/ has each
page once, 1280 pixels wide and light; the folder gets each at two widths and in both colour schemes.
"""

import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, expect, sync_playwright

from scorepool import Client, Generate, Score, ScoreItem
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs/screenshots"
WIDTHS = (390, 1280)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
HEIGHT = 900
CODE = " os\nimport sys\n\ndef main():\n    return os.path.join('a', 'b')\n"
KEY = "the key of ann"
LOAD_S = 150.0  # of work, so that the charts have lines


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_API_KEYS": f"ann:{hashlib.sha256(KEY.encode()).hexdigest()}",
    }
    models = [f"demo={ROOT}/scorepool/models/demo"]
    with tempfile.TemporaryDirectory() as state, sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with Stack(models, state=Path(state), environ=environ, logs=Path(state) / "logs") as stack:
            with Client(stack.url, api_key=KEY) as client:
                paths = pages_with_work(client)
            for width, scheme in [(1280, "light")] if folder is None else product(WIDTHS, SCHEMES):
                page = log_in(browser, stack.url, width, scheme)
                for name, path in paths.items():
                    target = DOCS / f"{name}.png" if folder is None else folder / f"{name}-{width}-{scheme}.png"
                    take(page, stack.url + path, target)
                page.close()
        browser.close()


def pages_with_work(client: Client) -> Mapping[str, str]:
    """Give the server some work. Return the paths of the pages by the names of their pictures."""
    client.wait_until_ready()
    items = [ScoreItem(prompt="import", completion=CODE), ScoreItem(prompt="a", completion=" b")]
    first = client.submit(Score(model="demo", items=items, rank=True, entropy=True, top_logprobs=5)).detach()
    second = client.submit(Score(model="demo", items=items, temperature=2.0)).detach()
    too_long = client.submit(Score(model="demo", items=[ScoreItem(prompt="a", completion="b" * 60_000)])).detach()
    list(client.as_completed([first, second, too_long]))
    until = time.monotonic() + LOAD_S
    while time.monotonic() < until:
        for _ in client.gather([Generate(model="demo", prompt=f"import {n}", max_tokens=32) for n in range(40)]):
            pass
    more = [Score(model="demo", items=items * number) for number in range(1, 9)]
    client.result(client.submit(more.pop()).detach())
    for each in more:
        client.submit(each).detach()
    client.wait_for_batch(create_batch(client, 8))
    running = create_batch(client, 2000)
    return {
        "overview": "/",
        "jobs": "/jobs?kind=score",
        "tokens": f"/jobs/{first.id}",
        "compare": f"/jobs/{first.id}/compare?with={second.id}",
        "batches": "/batches",
        "batch": f"/batches/{running}",
        "models": "/served-models",
        "playground": "/playground",
        "api": "/docs",
    }


def create_batch(client: Client, num_lines: int) -> str:
    """Create a batch one of whose lines fails, and return its id."""
    bodies = [{"model": "demo", "prompt": f"import {index}", "max_tokens": 32} for index in range(num_lines)]
    bodies[0] |= {"prompt": "x" * 60_000}
    lines = (
        {"custom_id": f"{index}", "method": "POST", "url": "/v1/completions", "body": body}
        for index, body in enumerate(bodies)
    )
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return client.create_batch(client.upload_file(content).id, "/v1/completions").id


def log_in(browser: Browser, url: str, width: int, scheme: Literal["light", "dark"]) -> Page:
    page = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
    page.goto(f"{url}/login")
    page.get_by_label("key").fill(KEY)
    page.get_by_role("button").click()
    page.wait_for_url(f"{url}/")
    return page


def take(page: Page, url: str, target: Path) -> None:
    """Take a picture of the whole page, of the playground when it has run."""
    page.goto(url)
    if url.endswith("/playground"):
        page.get_by_role("textbox", name="prompt").fill("def main(")
        page.get_by_role("button", name="Run").click()
        expect(page.locator("#job")).to_be_visible(timeout=60_000)
    if "/jobs/" in url:
        page.locator(".t").nth(3).focus()
    page.wait_for_timeout(3000)  # charts, events
    page.screenshot(path=target, full_page=not url.endswith("/docs"))


if __name__ == "__main__":
    main()
