// What is chosen, kept in the address; keys; light and dark; and the start of it all.

const state = {
  view: best,
  at: 0,
  output: 0,
  who: "network",
  range: "whole",
  filter: "all",
  truth: null,
  said: null,
  surrogate: null,
  query: "",
  order: "given",
};
const watchers = [];

// `draw(before)` runs whenever one of these fields has changed, and once at the start (then without `before`).
function watch(fields, draw) {
  watchers.push({ fields, draw });
}

function change(next) {
  const before = { ...state };
  Object.assign(state, next);
  state.output = Math.min(state.output, VIEWS[state.view].outputs.shape[1] - 1);
  const changed = Object.keys(state).filter((key) => state[key] !== before[key]);
  if (!changed.length) return;
  for (const { fields, draw } of watchers) if (fields.some((f) => changed.includes(f))) draw(before);
  remember();
}

// ---- address --------------------------------------------------------------------------------------------------------

function hash() {
  const output = state.output ? `&output=${state.output}` : "";
  return `#sample=${SHOWN[state.at]}&kernel=${encodeURIComponent(VIEWS[state.view].name)}${output}`;
}

let waiting = 0;

// A little later, since browsers refuse an address that changes with every repeat of a held key.
function remember() {
  clearTimeout(waiting);
  waiting = setTimeout(() => history.replaceState(null, "", hash()), 150);
}

// What the address says, as far as it can be made out.
function recall() {
  const said = new URLSearchParams(location.hash.slice(1));
  const at = PLACE.get(Number(said.get("sample") ?? NaN));
  const view = VIEWS.findIndex((v) => v.name === said.get("kernel"));
  const output = Number(said.get("output") ?? 0);
  return {
    ...(at !== undefined && { at }),
    ...(view >= 0 && { view }),
    ...(at !== undefined && Number.isInteger(output) && output >= 0 && { output }),
  };
}

// ---- keys -----------------------------------------------------------------------------------------------------------

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

// ---- light and dark -------------------------------------------------------------------------------------------------

const MEMORY = "tangency-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

// A browser may refuse to remember (private windows, some file pages); then the choice lasts as long as the page.
function remembered(value) {
  try {
    if (value) localStorage.setItem(MEMORY, value);
    return localStorage.getItem(MEMORY);
  } catch {
    return null;
  }
}

function theme() {
  const root = document.documentElement;
  const button = el("button", { type: "button", class: "icon", id: "theme" });
  const now = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const show = () => {
    const other = now() === "dark" ? "light" : "dark";
    button.textContent = other === "dark" ? "☾" : "☀";
    button.title = `Switch to ${other}`;
    button.setAttribute("aria-label", button.title);
  };
  const before = remembered();
  if (before === "dark" || before === "light") root.dataset.theme = before;
  button.addEventListener("click", () => {
    root.dataset.theme = now() === "dark" ? "light" : "dark";
    remembered(root.dataset.theme);
    show();
  });
  dark.addEventListener("change", show);
  show();
  return button;
}

// ---- start ----------------------------------------------------------------------------------------------------------

function bar() {
  const views =
    VIEWS.length > 1
      ? choice(
          "Kernel",
          VIEWS.map((v, k) => ({
            key: k,
            title: v.title,
            label: [k < 9 && el("small", { "aria-hidden": "true" }, String(k + 1)), v.name],
          })),
          (k) => change({ view: Number(k) })
        )
      : el("span", { class: "single", title: VIEWS[0].title }, VIEWS[0].name);
  views.id = "kernels";
  if (views.press)
    watch(["view"], () => {
      views.press(state.view);
      const button = views.children[state.view];
      views.scrollLeft = button.offsetLeft - views.offsetLeft - (views.clientWidth - button.offsetWidth) / 2;
    });
  const links = [
    ["overview", "Overview"],
    ["faithful", "Faithful?"],
    ["why", "Decisions"],
    ["kernel", "Kernel matrix"],
    ["foot", "About"],
  ];
  // The address is kept for the sample, so these scroll by themselves.
  const go = (id) => (event) => {
    event.preventDefault();
    by(id).scrollIntoView({ behavior: "smooth" });
  };
  by("bar").append(
    el(
      "nav",
      { "aria-label": "Sections" },
      links.map(([id, words]) => el("a", { href: `#${id}`, onclick: go(id) }, words))
    ),
    el("div", { class: "which" }, el("span", {}, "Kernel"), views),
    theme()
  );
}

async function start() {
  await decode();
  bar();
  by("main").append(hero(), faithful(), explorer(), kernelItself());
  foot();
  Object.assign(state, recall());
  for (const { draw } of watchers) draw();
  if (location.hash.includes("sample=")) by("why").scrollIntoView();
  addEventListener("keydown", pressed);
  addEventListener("hashchange", () => {
    const next = recall();
    if (Object.keys(next).length) explore(next);
  });
  document.documentElement.dataset.ready = "true";
}

// Without this a browser that is too old would show an empty page.
start().catch((error) => {
  by("main").append(
    el(
      "p",
      { class: "card" },
      `This page could not be drawn: ${error.message}. A browser of 2022 or later is needed.`
    )
  );
  throw error;
});
