// What was decided about the suspects, remembered by the browser where it lets the page do so.

const ACTIONS = { keep: "keep", fix: "fix", drop: "drop" };
const MEMORY = `tangency-audit-${A.memory}`;
const decided = new Map(); // number of a training sample → {action, label}; label: a class, of "fix" alone
const past = []; // what undo takes back: [[sample, what was decided before], …] of each step
let kept = true; // whether the browser remembers
let unsaved = false; // whether something was decided since the last file was written

// A browser may refuse to remember (private windows, some file pages), or have no room left.
function store(value) {
  try {
    if (value === undefined) return localStorage.getItem(MEMORY);
    localStorage.setItem(MEMORY, value);
    kept = true;
  } catch {
    kept = false;
  }
  return null;
}

function save() {
  store(JSON.stringify([...decided].map(([sample, d]) => [sample, d.action, d.label ?? null])));
  unsaved = true;
}

// What was remembered, as far as it fits: other programs may have written there.
function load() {
  let said = null;
  try {
    said = JSON.parse(store() ?? "[]");
  } catch {
    return;
  }
  decided.clear();
  for (const entry of Array.isArray(said) ? said : []) {
    if (!Array.isArray(entry)) continue;
    const [sample, action, label] = entry;
    if (isDecision(sample, action, label)) decided.set(sample, action === "fix" ? { action, label } : { action });
  }
}

const isDecision = (sample, action, label) =>
  Number.isInteger(sample) &&
  sample >= 0 &&
  sample < A.samples &&
  Object.hasOwn(ACTIONS, action) &&
  (action !== "fix" || (!A.real && Number.isInteger(label) && label >= 0 && label < A.classes.length));

// Decisions, [[sample, {action, label} or undefined: none], …], as one step that undo takes back.
function decide(all) {
  past.push(all.map(([sample]) => [sample, decided.get(sample)]));
  put(all);
}

function put(all) {
  for (const [sample, d] of all) d ? decided.set(sample, d) : decided.delete(sample);
  save();
}

// The samples of the last step, as they were before it.
function takeBack() {
  const step = past.pop();
  if (step) put(step);
  return step ? step.map(([sample]) => sample) : [];
}

const inWords = (d) => (!d ? "undecided" : d.action === "fix" ? `fix to ${name(d.label)}` : d.action);

load();
store(store() ?? "[]"); // a browser may read and not write
// Another window with the same page has decided something.
addEventListener("storage", (event) => {
  if (event.key !== MEMORY) return;
  load();
  change({ changes: state.changes + 1 });
});
addEventListener("beforeunload", (event) => {
  if (!kept && unsaved) event.preventDefault();
});
