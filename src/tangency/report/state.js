// What is chosen, who draws again when it changes, and the address that keeps it. Each part of the page adds its own.

const state = {};
const watchers = [];
const rules = []; // each sets right what a change has left out of order
// What the address keeps: {room: its section, say: () => ({key: value}), read: (said) => changes, open: (changes) => …}
const addresses = [];

// `draw(before)` runs whenever one of these fields has changed, and once at the start (then without `before`).
function watch(fields, draw) {
  watchers.push({ fields, draw });
}

function change(next) {
  const before = { ...state };
  Object.assign(state, next);
  for (const rule of rules) rule();
  const changed = Object.keys(state).filter((key) => state[key] !== before[key]);
  if (!changed.length) return;
  for (const { fields, draw } of watchers) if (fields.some((f) => changed.includes(f))) draw(before);
  remember();
}

// ---- address --------------------------------------------------------------------------------------------------------

function hash() {
  const parts = addresses.flatMap((kept) => Object.entries(kept.say()));
  return `#${parts.map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&")}`;
}

let waiting = 0;

// A little later, since browsers refuse an address that changes with every repeat of a held key.
function remember() {
  clearTimeout(waiting);
  waiting = setTimeout(() => history.replaceState(null, "", hash()), 150);
}

// What the address says, as far as it can be made out: [kept, changes] of each part of the page that it names.
function recall() {
  const said = new URLSearchParams(location.hash.slice(1));
  return addresses.map((kept) => [kept, kept.read(said)]).filter(([, next]) => Object.keys(next).length);
}
