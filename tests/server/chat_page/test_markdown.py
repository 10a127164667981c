"""Markdown as the page shows it: what models write becomes the right nodes, and never anything but text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.server.chat_page.opened_page import OpenedPage
from tests.server.conftest import RunningServer

#: Renders a text at once, or as it grows by so many characters a time. Buttons and such are left out.
RENDER = """async ([text, width]) => {
    const { renderMarkdown } = await import("/ui/markdown.js");
    const container = document.createElement("div");
    for (let end = width || text.length; end < text.length; end += width) renderMarkdown(container, text.slice(0, end));
    renderMarkdown(container, text);
    for (const button of container.querySelectorAll("button")) button.remove();
    return container.innerHTML;
}"""
MILLISECONDS = """async (text) => {
    const { renderMarkdown } = await import("/ui/markdown.js");
    const started = performance.now();
    renderMarkdown(document.createElement("div"), text);
    return performance.now() - started;
}"""
#: What is still selected, scrolled and focused in a code block, within an item, that has grown.
GROWING_CODE = """async () => {
    const { renderMarkdown } = await import("/ui/markdown.js");
    const container = document.createElement("div");
    container.className = "markdown";
    document.getElementById("messages").append(container);
    document.body.classList.remove("is-empty");
    const text = "1. a\\n\\n   ```py\\n   " + "x".repeat(2000);
    renderMarkdown(container, text);
    const pre = container.querySelector("pre");
    pre.scrollLeft = 500;
    container.querySelector("button").focus();
    getSelection().selectAllChildren(pre.firstChild);
    renderMarkdown(container, text + "\\n   more\\n   ``");
    renderMarkdown(container, text + "\\n   more\\n   ```");
    const isWhole = pre.textContent === "x".repeat(2000) + "\\nmore";
    return [getSelection().toString().length >= 2000, pre.scrollLeft, document.activeElement.ariaLabel, isWhole];
}"""
#: Whether all elements but those of the last part stay the same ones.
KEPT_NODES = """async ([before, after]) => {
    const { renderMarkdown } = await import("/ui/markdown.js");
    const container = document.createElement("div");
    renderMarkdown(container, before);
    const nodes = [...container.querySelectorAll("li, tr, blockquote p")].slice(0, -1);
    renderMarkdown(container, before + after);
    return nodes.length >= 2 && nodes.every((node) => container.contains(node));
}"""
LINK = 'target="_blank" rel="noopener noreferrer"'


def code(text: str, language: str = "text") -> str:
    caption = f"<figcaption><span>{language}</span></figcaption>"
    return f'<figure class="code">{caption}<pre tabindex="0"><code>{text}</code></pre></figure>'


def link(url: str, text: str) -> str:
    # In the order in which the attributes are set.
    return f'<a href="{url}" {LINK} title="{url}">{text}</a>'


CASES = {
    "paragraphs": ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    "headings": ("# A\n### B *c*\n#not", "<h1>A</h1><h3>B <em>c</em></h3><p>#not</p>"),
    "emphasis": (
        "**a** *b* __c__ _d_ ~~e~~ ***f*** **g *h***",
        "<p><strong>a</strong> <em>b</em> <strong>c</strong> <em>d</em> <del>e</del> <strong><em>f</em></strong> "
        "<strong>g <em>h</em></strong></p>",
    ),
    "no emphasis": ("2 * 3 * 4, snake_case_name, a ** b, *open", "<p>2 * 3 * 4, snake_case_name, a ** b, *open</p>"),
    "escapes": (r"\*a\* \# \\", r"<p>*a* # \</p>"),
    "code in a line": ("`a*b*` ``c ` d`` `open", "<p><code>a*b*</code> <code>c ` d</code> `open</p>"),
    "a code block": ("x\n```python\nif a < b:\n\n    *c*\n```\ny", None),
    "tabs in code": ("```\nall:\n\tcc\tx\n```", code("all:\n\tcc\tx")),
    "indented code": ("a:\n\n    def f():\n        # one\n\n        return 1\n\nb", None),
    "code indented by tabs": ("\tall:\n\t\tcc", code("all:\n\tcc")),
    "no code in a paragraph": ("a\n    b", "<p>a<br>b</p>"),
    "items indented by tabs": (
        "-\ta\n\t- b\n\n\t  ```\n\t  \tc\n\t  ```",
        f'<ul class="loose"><li><p>a</p><ul class="loose"><li><p>b</p>{code(chr(9) + "c")}</li></ul></li></ul>',
    ),
    "code that begins an item": ("- ```\n  a\n  ```\n- b", f"<ul><li>{code('a')}</li><li><p>b</p></li></ul>"),
    "headings with marks after them": ("## a #b ##\n# #\n#\ta", "<h2>a #b</h2><h1></h1><h1>a</h1>"),
    "tildes around code": ("~~~\n```\n~~~", code("```")),
    "an open code block": ("```js\nlet a = 1;\n", code("let a = 1;\n", "js")),
    "an unordered list": ("- a\n- b\n* c", "<ul><li><p>a</p></li><li><p>b</p></li></ul><ul><li><p>c</p></li></ul>"),
    "an ordered list": ("3. a\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
    "nested lists": (
        "1. a\n   - b\n     - c\n2. d",
        '<ol start="1"><li><p>a</p><ul><li><p>b</p><ul><li><p>c</p></li></ul></li></ul></li><li><p>d</p></li></ol>',
    ),
    "a list with gaps": ("- a\n\n- b", '<ul class="loose"><li><p>a</p></li><li><p>b</p></li></ul>'),
    "code in a list": (
        "1. a\n   ```sh\n   - not an item\n   ```\n2. b",
        f'<ol start="1"><li><p>a</p>{code("- not an item", "sh")}</li><li><p>b</p></li></ol>',
    ),
    "a list after a line": ("a:\n- b\n- c", "<p>a:</p><ul><li><p>b</p></li><li><p>c</p></li></ul>"),
    "a number is no list": ("in\n1984. Then", "<p>in<br>1984. Then</p>"),
    "a quote": ("> a\n> > b\n>\n> - c", None),
    "a rule": ("a\n\n---\n\n***", "<p>a</p><hr><hr>"),
    "a table": ("| a | b |\n|:--|--:|\n| `x` | 1 |\n| y \\| z |", None),
    "no table": ("a | b\nc", "<p>a | b<br>c</p>"),
    "links": (
        '[a **b**](https://x.org/c "d") <https://x.org/e> https://x.org/f(g)? (https://x.org/h).',
        f"<p>{link('https://x.org/c', 'a <strong>b</strong>')} {link('https://x.org/e', 'https://x.org/e')} "
        f"{link('https://x.org/f(g)', 'https://x.org/f(g)')}? ({link('https://x.org/h', 'https://x.org/h')}).</p>",
    ),
    "no link in a link": (
        "[see https://y.org](https://x.org/)",
        f"<p>{link('https://x.org/', 'see https://y.org')}</p>",
    ),
    "a picture is a link": ("![cat](https://x.org/c.png)", f"<p>{link('https://x.org/c.png', 'Picture: cat')}</p>"),
}
#: Too long for the table.
LONG = {
    "a code block": f"<p>x</p>{code('if a &lt; b:' + chr(10) * 2 + '    *c*', 'python')}<p>y</p>",
    "indented code": f"<p>a:</p>{code('def f():' + chr(10) + '    # one' + chr(10) * 2 + '    return 1')}<p>b</p>",
    "a quote": "<blockquote><p>a</p><blockquote><p>b</p></blockquote><ul><li><p>c</p></li></ul></blockquote>",
    "a table": '<div class="table" tabindex="0" role="region" aria-label="Table"><table><thead><tr><th class="left">a'
    '</th><th class="right">b</th></tr></thead><tbody><tr><td class="left"><code>x</code></td><td class="right">1'
    '</td></tr><tr><td class="left">y | z</td><td class="right"></td></tr></tbody></table></div>',
}
HOSTILE = {
    "<script>alert(1)</script>": "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>",
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "[a](javascript:alert(1))": "<p><span>a</span></p>",
    "[a](JaVaScRiPt:alert(1))": "<p><span>a</span></p>",
    "[a](data:text/html,x)": "<p><span>a</span></p>",
    "[a](/v1/models)": "<p><span>a</span></p>",
    "![a](x\" onerror=\"alert(1))": '<p>![a](x" onerror="alert(1))</p>',
    "<javascript:alert(1)>": "<p>&lt;javascript:alert(1)&gt;</p>",
    '```"><img src=x onerror=alert(1)>\nx\n```': code("x", '"&gt;&lt;img'),
    "|<b>|\n|-|": '<div class="table" tabindex="0" role="region" aria-label="Table"><table><thead><tr><th class="left">'
    "&lt;b&gt;</th></tr></thead><tbody></tbody></table></div>",
}  # fmt: skip
#: Each takes seconds if its time is quadratic or its depth unbounded.
ENDLESS = [
    "*a ",
    "**a ",
    "[",
    "[a](",
    "`",
    "`a``b",
    "> ",
    "- ",
    "_a_",
    "~~",
    "![",
    "<https://",
    "|",
    "\\",
    "((",
    "1. a\n",
    "- a\n\n",
    "    a\n\n",
    "```\n",
    "a|\n",
    " #",
    "-:",
]
SPACES = " " * 60_000
#: The same with something before and after it.
LONG_LINES = [
    f"# a{SPACES}b",
    f"|\n|-{SPACES}x",
    f"```{SPACES}`",
    "~" * 60_000 + "`",
    f"-{SPACES}x\n- y",
    f"{SPACES}- x\n" + "- y\n" * 1000,
    "\t" * 60_000 + "x",
]


@pytest.fixture
def opened(server: RunningServer, open_page: Callable[..., OpenedPage]) -> OpenedPage:
    return open_page(server.url)


@pytest.fixture
def render(opened: OpenedPage) -> Callable[..., str]:
    def render(text: str, width: int = 0) -> str:
        return str(opened.page.evaluate(RENDER, [text, width]))

    return render


def test_what_models_write(render: Callable[..., str]) -> None:
    for name, (text, expected) in CASES.items():
        assert render(text) == (expected or LONG[name]), name


def test_a_growing_text_ends_as_the_whole_one(render: Callable[..., str]) -> None:
    text = "\n\n".join(text for text, _ in CASES.values())
    whole = render(text)
    for width in (1, 7):
        assert render(text, width) == whole


def test_nothing_becomes_html(render: Callable[..., str]) -> None:
    for text, expected in HOSTILE.items():
        assert render(text) == expected, text


def test_no_text_takes_quadratic_time(opened: OpenedPage) -> None:
    for text in [piece * (60_000 // len(piece)) for piece in ENDLESS] + LONG_LINES:
        # The second time if something else has kept the machine busy.
        assert any(opened.page.evaluate(MILLISECONDS, text) < 1000 for _ in range(2)), text[:20]


def test_a_growing_block_keeps_what_the_reader_does(opened: OpenedPage) -> None:
    """Its scroll position, selection and focus; and what is above it is not made again."""
    assert opened.page.evaluate(GROWING_CODE) == [True, 500, "Copy code", True]
    for before, after in (("- a\n- b\n- c", "d\n- e"), ("|a|\n|-|\n|b|\n|c|\n", "|d|\n"), ("> a\n>\n> b\n>\n> c", "d")):
        assert opened.page.evaluate(KEPT_NODES, [before, after]), before
