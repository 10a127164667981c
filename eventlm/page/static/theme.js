// Light or dark: as the system has it, or as the reader chose, which the chat page of the same server knows too.

import { useEffect, useState } from "preact/hooks";

const KEY = "eventlm.theme";
const CHOICES = ["system", "light", "dark"];
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();
const chosen = { theme: remembered() };
apply();
systemIsDark.addEventListener("change", apply);

// The storage may be closed to a page from a file.
function remembered() {
  try {
    const theme = JSON.parse(localStorage.getItem(KEY));
    return CHOICES.includes(theme) ? theme : "system";
  } catch {
    return "system";
  }
}

function apply() {
  document.documentElement.dataset.theme = chosen.theme;
  for (const listener of listeners) listener();
}

function isDark() {
  return chosen.theme === "system" ? systemIsDark.matches : chosen.theme === "dark";
}

/** Change the theme, for this page and the next. */
export function chooseTheme(theme) {
  chosen.theme = theme;
  try {
    localStorage.setItem(KEY, JSON.stringify(theme));
  } catch {
    // It is chosen for this page only.
  }
  apply();
}

/** The theme as chosen, and whether it is dark now. A component that uses it is drawn again on a change. */
export function useTheme() {
  const [state, setState] = useState({ theme: chosen.theme, dark: isDark() });
  useEffect(() => {
    const listener = () => setState({ theme: chosen.theme, dark: isDark() });
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return state;
}

/** Colours of the style sheet for a canvas, which knows no variables: `{line: "rgb(…)"}` for `--line`. */
export function resolveColours(...names) {
  const probe = document.createElement("span");
  document.body.append(probe);
  const colours = {};
  for (const name of names) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return colours;
}
