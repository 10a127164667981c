"""Pages about a run: components in the browser, and what joins them with data into one file or serves them.

`linker` joins the ES modules of `static/`, those of a caller and the vendored libraries into one script, `document`
makes HTML of it, and `columns` packs integers for it. A page of one's own is a folder with an entry module:

    import { h } from "preact";
    import { start } from "./shell.js";
    start((data) => h(App, { data }));

Text becomes text nodes only: no module makes HTML from a string, and the policy of the document forbids it.
"""
