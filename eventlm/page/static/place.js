// Where the reader is: a tab and named values, kept in the address behind #, so that a link leads to any place.

import { useEffect, useState } from "preact/hooks";

function parse(hash) {
  const [tab, values = ""] = hash.slice(1).split("?", 2);
  return { tab: decode(tab), values: Object.fromEntries(new URLSearchParams(values)) };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

/** The address of a place in this page: `#timeline?from=5&to=6`. Values that are null are left out. */
export function linkTo(tab, values = {}) {
  const given = Object.entries(values).filter(([, value]) => value !== null && value !== undefined);
  const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return `#${encodeURIComponent(tab)}${query && `?${query}`}`;
}

/** The place, and a function that goes to another: `go(tab, values)`. Back and forward work as on any page. */
export function usePlace() {
  const [place, setPlace] = useState(() => parse(location.hash));
  const follow = () => setPlace(parse(location.hash));
  useEffect(() => {
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  function go(tab, values) {
    location.hash = linkTo(tab, values);
    // The event comes later, maybe after the next key.
    follow();
  }
  return [place, go];
}
