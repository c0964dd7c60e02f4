// Keys: the next sample, another kernel, the search.

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.closest("input, select, textarea");
  if (event.key === "Escape" && typing) {
    typing.blur();
    if (state.query) change({ query: "" });
    return;
  }
  if (typing) return;
  // Inside what scrolls sideways the arrows scroll.
  const scrolls = event.target.closest(".wide");
  const act =
    {
      ArrowRight: !scrolls && (() => step(1)),
      ArrowLeft: !scrolls && (() => step(-1)),
      j: () => step(1),
      k: () => step(-1),
      "/": () => by("search").focus(),
    }[event.key] ||
    (/^[1-9]$/.test(event.key) && VIEWS[event.key - 1] && (() => change({ view: Number(event.key) - 1 })));
  if (!act) return;
  event.preventDefault();
  act();
}
