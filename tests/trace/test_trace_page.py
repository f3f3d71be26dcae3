"""The page: self-contained, safe, and its script runs."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from hetero.trace import Operator, StepTrace, Storage, read_trace, to_html, trace_step, write_html

# Enough of a browser to run the page's script: every drawn rectangle must have finite numbers.
BROWSER = """
const fs = require("fs"), vm = require("vm");
const html = fs.readFileSync(process.argv[1], "utf8");
let rectangles = 0;
const brush = new Proxy({}, {
  get: (t, key) => key in t ? t[key] : (...a) => {
    if (key === "fillRect" && ++rectangles && !a.every(Number.isFinite)) throw Error("fillRect " + a);
  },
  set: (t, key, value) => { t[key] = value; return true; },
});
const element = () => ({ textContent: "", style: {}, children: [], clientWidth: 900, clientHeight: 340,
  append(...c) { this.children.push(...c); }, replaceChildren(...c) { this.children = c; },
  getBoundingClientRect: () => ({ left: 0 }), getContext: () => brush });
const elements = {}, get = id => elements[id] ??= element();
get("data").textContent = html.match(/<script id="data"[^>]*>([^]*?)<\\/script>/)[1];
const document = { getElementById: get, createElement: element, documentElement: {} };
vm.runInNewContext(html.match(/<script>([^]*?)<\\/script>/)[1],
  { document, window: {}, getComputedStyle: () => ({ getPropertyValue: () => "#000" }), console });
const cells = () => get("rows").children.map(row => row.children.map(cell => cell.textContent));
const out = { title: get("title").textContent, peak: cells() };

const canvas = get("load"), to = clientX => ({ clientX });
canvas.onmousedown(to(200)); canvas.onmousemove(to(500)); canvas.onmouseup(to(500));
canvas.ondblclick(); canvas.onmouseleave();
canvas.onmousedown({ clientX: 75 }); canvas.onmouseup({ clientX: 75 });
out.first = get("readout").textContent;
get("legend").children.forEach(entry => entry.onclick());
out.hidden = cells();
out.rectangles = rectangles;
console.log(JSON.stringify(out));
"""


def small() -> StepTrace:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return trace_step(lambda m, x: m(x).sum().backward(), model, torch.ones(4, 8))


def test_the_page_fetches_nothing() -> None:
    page = to_html(small())
    assert not re.search(r"https?://|//cdn|<link|<script[^>]*src|@import|fetch\(|XMLHttpRequest", page)


def test_names_cannot_become_markup() -> None:
    name = "</script><script>alert(1)</script><!--"
    trace = StepTrace(
        operators=(Operator(name=name, phase="forward", module=name, reads=(), writes=(0,)),),
        storages=(Storage(id=0, begin=0, end=1, nbytes=8, kind="input", name=name, device="cpu"),),
        span=1,
        device="cpu",
        source="real",
    )
    page = to_html(trace)
    assert page.count("</script>") == 2
    assert "alert(1)" in page
    data = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    assert data["strings"] == [name]


def test_a_trace_without_operators_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,lower,upper,size\na,0,2,10\nb,1,3,20\n")
    page = to_html(read_trace(tmp_path / "t.csv"))
    assert '"peak":30,"peak_at":1' in page


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run the script with")
def test_the_script_shows_the_peak_and_survives_a_user(tmp_path: Path) -> None:
    trace = small()
    write_html(trace, tmp_path / "page.html")
    done = subprocess.run(
        ["node", "-e", BROWSER, str(tmp_path / "page.html")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert f"at operator {trace.peak_at()} of {trace.span}" in shown["title"]
    assert [row[4] for row in shown["peak"]] == [s.name for s in trace.live_at(trace.peak_at())]
    assert shown["first"].startswith("operator 0: ")
    assert trace.operators[0].name in shown["first"]
    assert shown["hidden"] == []
    assert shown["rectangles"] > trace.span
