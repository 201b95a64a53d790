"""`python -m tests.browser [--collectives 100000] [--screenshot FILE]`: the report's page in headless Chromium.

Needs `chromium` (or `google-chrome`) on the path; not part of the test command. Opens the page of a large run, types
into its search box, scrolls, picks a role, clicks a row, searches a page without graphs, and prints seconds and what
the page then showed as JSON. Exit code 0 when all is as it should be.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from collective_identity.ledger import Ledger
from collective_identity.reporting import build_report, read_run
from collective_identity.reporting.page import page
from tests.large_run import write

_PROBE = """
<pre id="probe"></pre>
<script>
(() => {
  const found = { opened_ms: performance.now() };
  const shown = () => document.getElementById("shown").textContent;
  const timed = (name, work) => { const start = performance.now(); work(); found[name] = performance.now() - start; };
  const type = (text) => { document.getElementById("search").value = text;
    document.getElementById("stage").dispatchEvent(new Event("change")); };
  found.all = shown();
  found.rows_drawn = document.querySelectorAll("#rows .row").length;
  found.buckets = document.getElementById("bucketcount").textContent;
  timed("first_filter_ms", () => type("weight_3"));
  found.weight_3 = shown();
  timed("next_filter_ms", () => type("layers.17. gather"));
  found.layer_17 = shown();
  found.first_row = document.querySelector("#rows .row").textContent;
  document.querySelector("#rows .row").click();
  found.detail = document.querySelector("#detail pre").textContent;
  type("");
  timed("graph_ms", () => { document.getElementById("graphs").value = "1";
    document.getElementById("graphs").dispatchEvent(new Event("change")); });
  found.backward = shown();
  timed("role_ms", () => { document.getElementById("role").value = "fsdp.grad_reduce_shard";
    document.getElementById("role").dispatchEvent(new Event("change")); });
  found.reductions = shown();
  document.getElementById("rows").scrollTop = 1e6;
  document.getElementById("probe").textContent = JSON.stringify(found);
})();
</script>
</body>"""


_EMPTY = """
<pre id="probe"></pre>
<script>
(() => {
  document.getElementById("search").value = "weight";
  window.onerror = (text) => { document.getElementById("probe").textContent = JSON.stringify({ no_graph: text }); };
  document.getElementById("stage").dispatchEvent(new Event("change"));
  const shown = document.getElementById("shown").textContent;
  if (!document.getElementById("probe").textContent)
    document.getElementById("probe").textContent = JSON.stringify({ no_graph: shown });
})();
</script>
</body>"""


def main() -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collectives", type=int, default=100_000)
    parser.add_argument("--screenshot", type=Path, help="save a picture of the page here")
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
    if browser is None:
        parser.error("needs chromium or google-chrome on the path")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "run", options.collectives)
        text = page(build_report(read_run(folder / "run")), title="a large run")
        (folder / "page.html").write_text(text.replace("</body>", _PROBE))
        found = _open(browser, folder, f"file://{folder}/page.html")
        Ledger(mode="optimize", run_dir=str(folder / "none"), agreement_timeout=0.0).close()
        empty = page(build_report(read_run(folder / "none")), title="a run without a graph")
        (folder / "empty.html").write_text(empty.replace("</body>", _EMPTY))
        found |= _open(browser, folder, f"file://{folder}/empty.html")
        if options.screenshot is not None:
            plain = folder / "plain.html"
            plain.write_text(text)
            _run(browser, folder, f"--screenshot={options.screenshot.absolute()}", f"file://{plain}")
    third = options.collectives // 3
    expected = {
        "no_graph": "0 of 0",
        "all": f"{third:,} of {third:,}",
        "weight_3": f"{(third - 3 + 7) // 8:,} of {third:,}",
        "layer_17": f"8 of {third:,}",
        "backward": f"{options.collectives - third:,} of {options.collectives - third:,}",
        "reductions": f"{options.collectives - 2 * third:,} of {options.collectives - third:,}",
    }
    wrong = {key: (found[key], value) for key, value in expected.items() if found[key] != value}
    smooth = found["rows_drawn"] < 60 and found["next_filter_ms"] < 200 and "layers.17.weight_0" in found["detail"]
    print(json.dumps({"collectives": options.collectives, **found, "wrong": wrong, "ok": not wrong and smooth}))
    return 0 if not wrong and smooth else 1


def _open(browser: str, folder: Path, address: str) -> dict[str, Any]:
    shown = re.search(r'<pre id="probe">(.*?)</pre>', _run(browser, folder, "--dump-dom", address), re.DOTALL)
    assert shown is not None, "the page did not load"
    assert shown[1], "the page's script failed"
    return json.loads(html.unescape(shown[1]))  # type: ignore[no-any-return]


def _run(browser: str, folder: Path, *arguments: str) -> str:
    fixed = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,2000")
    command = [browser, *fixed, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout


if __name__ == "__main__":
    raise SystemExit(main())
