// What is chosen among the decisions, and the part of the address that keeps it.

// The page opens on a decision that needs explaining, where there is one: a sample that the network got wrong.
const opening = Math.max(
  0,
  SAID.findIndex((k, at) => k !== TRUTH[at])
);

Object.assign(state, {
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
});
rules.push(() => (state.output = Math.min(state.output, VIEWS[state.view].outputs.shape[1] - 1)));

addresses.push({
  room: "why",
  say: () => ({
    sample: SHOWN[state.at],
    kernel: VIEWS[state.view].name,
    ...(state.output && { output: state.output }),
  }),
  read: (said) => {
    const at = PLACE.get(Number(said.get("sample") ?? NaN));
    const view = VIEWS.findIndex((v) => v.name === said.get("kernel"));
    const output = Number(said.get("output") ?? 0);
    return {
      ...(at !== undefined && { at }),
      ...(view >= 0 && { view }),
      ...(at !== undefined && Number.isInteger(output) && output >= 0 && { output }),
    };
  },
  open: (next) => explore(next),
});
