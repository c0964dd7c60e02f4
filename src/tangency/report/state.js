// What is chosen, who draws again when it changes, and the address that keeps it.

// The page opens on a decision that needs explaining, where there is one: a sample that the network got wrong.
const opening = Math.max(
  0,
  SAID.findIndex((k, at) => k !== TRUTH[at])
);

const state = {
  view: best,
  at: opening,
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
