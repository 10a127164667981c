// Not a module, so that it runs before the first paint: a page must not flash in the other theme.
document.documentElement.dataset.theme = (() => {
  try {
    return JSON.parse(localStorage.getItem("eventlm.theme")) ?? "system";
  } catch {
    return "system";
  }
})();
