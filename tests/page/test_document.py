"""A page in one file, and one of a server, run their own script and nothing else."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from eventlm.page.document import SERVED_HEADERS, SERVED_POLICY, served_page, single_file
from eventlm.page.linker import link, link_styles

SCRIPT = 'document.getElementById("app").textContent = JSON.parse(document.getElementById("data").textContent).text;'
#: What could end a script, a title or an attribute.
HOSTILE = "</script><script>document.title='owned'</script><!-- <script> ]]> \"'&amp; \u2028 \u202e é"


def policy_of(html: str) -> dict[str, str]:
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    return dict(part.split(" ", 1) for part in policy.replace("&#x27;", "'").split("; "))


def test_its_policy_allows_nothing_but_its_own_code() -> None:
    policy = policy_of(single_file("Run", SCRIPT, "p {}", {}))
    assert policy.pop("script-src").startswith("'sha256-")
    assert policy.pop("style-src").startswith("'sha256-")
    assert policy == {
        "default-src": "'none'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


def test_hostile_text_is_data(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(single_file(HOSTILE, SCRIPT, "#app { color: rgb(1, 2, 3); }", {"text": HOSTILE}))
    page = browser.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(path.as_uri())
    assert page.locator("#app").evaluate("node => node.textContent") == HOSTILE
    assert page.title().split() == HOSTILE.split()
    assert page.locator("#app").evaluate("node => getComputedStyle(node).color") == "rgb(1, 2, 3)"
    assert page.locator("script").count() == 2
    assert problems == []
    page.close()


def test_other_code_does_not_run(browser: Browser, tmp_path: Path) -> None:
    """A browser refuses a script, a handler and a style that somebody put into the file, and HTML from text."""
    html = single_file("Run", "globalThis.ran = [];", "p {}", {})
    added = (
        "<script>ran.push('script')</script><img src=x onerror=\"ran.push('handler')\">"
        "<img src='data:image/png;base64,A' onerror=\"ran.push('handler')\">"
        "<p style='color: red'>text</p><a href='javascript:ran.push(1)'>link</a>"
    )
    path = tmp_path / "page.html"
    path.write_text(html.replace("</body>", added + "</body>"))
    page = browser.new_page()
    page.goto(path.as_uri())
    page.get_by_text("link").click()
    refused = page.evaluate("(() => { try { document.body.innerHTML = '<b>'; } catch { return true; } })()")
    assert refused
    assert page.evaluate("ran") == []
    assert page.get_by_text("text").evaluate("node => getComputedStyle(node).color") == "rgb(0, 0, 0)"
    page.close()


def test_data_that_json_has_no_form_for_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        single_file("Run", "", "", {"value": float("nan")})


def test_a_served_page_has_its_files_beside_it() -> None:
    html = served_page("Dashboard <1>", "ui/look.js?a&b", "ui/look.css", "ui/icon.svg")
    assert "<title>Dashboard &lt;1&gt;</title>" in html
    assert re.findall(r'(?:src|href)="([^"]*)"', html) == ["ui/look.css", "ui/icon.svg", "ui/look.js?a&amp;b"]
    assert not re.search(r"<style|\sstyle=|<script>|Content-Security-Policy", html)
    policy = dict(part.split(" ", 1) for part in SERVED_POLICY.split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert policy["frame-ancestors"] == "'none'"
    assert SERVED_HEADERS["Content-Security-Policy"] == SERVED_POLICY


def test_a_served_page_runs_under_its_policy(browser: Browser) -> None:
    files = {
        "/": ("text/html", served_page("Served", "page.js", "page.css", "icon.svg")),
        "/page.js": ("text/javascript", link("served.js", Path(__file__).parent / "static")),
        "/page.css": ("text/css", link_styles()),
        "/icon.svg": ("image/svg+xml", '<svg xmlns="http://www.w3.org/2000/svg"/>'),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            media_type, text = files[self.path]
            self.send_response(200)
            for name, value in (SERVED_HEADERS | {"Content-Type": f"{media_type}; charset=utf-8"}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    page = browser.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        expect(page.get_by_role("heading", name="Served without data")).to_be_visible()
        expect(page.get_by_role("figure", name="Requests").locator("canvas")).to_be_visible()
        page.close()
        server.shutdown()
    assert problems == []
