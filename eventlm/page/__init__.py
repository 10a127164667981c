"""Pages about a run: components in the browser, and what joins them with data into one file or serves them.

`linker` joins the ES modules of `static/`, those of a caller and the vendored libraries into one script; `document`
makes HTML of it; `columns` packs integers for it, and `timeline` what happened to requests. A page of one's own is a
folder with an entry module:

    import { h } from "preact";
    import { Shell, start } from "./shell.js";
    start((data) => h(Shell, { title: data.title, tabs: [{ name: "queue", title: "Queue", draw: () => h(Queue) }] }));

and `single_file(title, link("entry.js", folder), link_styles(folder), data)` is the page. What there is:

* `shell.js`: header, theme and tabs; notices; `FailureShown` keeps a part that fails from taking the page with it
* `place.js`: the tab and values behind `#` in the address, for links to any place
* `cards.js`, `table.js`, `chart.js`, `timeline.js`: cards with figures, sorted tables, lines over time, the timeline
* `columns.js`, `timeline_model.js`: typed arrays of what Python has packed
* `format.js`, `theme.js`: numbers and times as people read them; colours of the style sheet for a canvas

Text becomes text nodes only: no module makes HTML from a string, and the policy of the document forbids it.
"""
