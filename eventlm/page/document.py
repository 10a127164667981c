"""HTML around a linked script: one file with its data, or a page of a server that has its files beside it.

Either way the browser runs this script only, loads nothing from elsewhere, and refuses to make HTML out of text.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from urllib.parse import quote

_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    '<rect width="32" height="32" rx="8" fill="#1c6b5c"/>'
    '<path d="M8 10h10M8 16h16M8 22h7" stroke="#fff" stroke-width="3" stroke-linecap="round"/></svg>'
)
#: No script can make HTML out of text; nothing is sent anywhere by a form.
_CLOSED = ["base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'"]

#: The policy of a page whose files a server has.
SERVED_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        *_CLOSED,
        # Only a header can say this, not a page.
        "frame-ancestors 'none'",
    ]
)
#: The headers of such a page and of its files. They change with the version only: a browser asks whether its copy is
#: current.
SERVED_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": SERVED_POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def single_file(title: str, script: str, styles: str, data: object) -> str:
    """A page that needs nothing but itself. `data` is what `start` of `shell.js` hands to the page.

    Raises ValueError for data that JSON has no form for, NaN among them.
    """
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash_source(script)}",
            f"style-src {_hash_source(styles)}",
            "img-src data:",
            *_CLOSED,
        ]
    )
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _page(
        title,
        [
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            f'<link rel="icon" href="data:image/svg+xml,{quote(_ICON)}">',
            f"<style>{styles}</style>",
        ],
        [
            # Inside a script, only this character can begin what HTML would read as its end.
            f'<script type="application/json" id="data">{text.replace("<", chr(92) + "u003c")}</script>',
            f"<script>{script}</script>",
        ],
    )


def served_page(title: str, script_url: str, styles_url: str, icon_url: str = "") -> str:
    """A page of a server, without data, to be sent with SERVED_HEADERS. The script and styles are files of it."""
    head = [f'<link rel="stylesheet" href="{escape(styles_url)}">']
    if icon_url:
        head.append(f'<link rel="icon" href="{escape(icon_url)}">')
    return _page(title, head, [f'<script src="{escape(script_url)}"></script>'])


def _hash_source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _page(title: str, head: list[str], scripts: list[str]) -> str:
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            *head,
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{escape(title)}</title>",
            "</head>",
            "<body>",
            '<div id="app"></div>',
            "<noscript>This page is drawn by its own script, and your browser runs none.</noscript>",
            *scripts,
            "</body>",
            "</html>",
            "",
        ]
    )
