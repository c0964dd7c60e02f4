// What the audit found, as the file carries it. A sample is meant by its number; `at` is a suspect's place in the list.

const A = DATA.audit;
const S = A.suspects;
const SUSPECTS = array(S.index);
const WRONG = array(S.wrong);
const MARGIN = array(S.margin);
const SUGGESTED = S.suggested && array(S.suggested);
const GIVEN = A.given && array(A.given); // of all training samples
const ASKED = A.asked && array(A.asked); // of the test samples with a place on the page
const RANK = new Map(Array.from(SUSPECTS, (sample, at) => [sample, at]));
const what = A.real ? "target" : "label";

// ---- names ----------------------------------------------------------------------------------------------------------

// As they are in the data, for files: what is shown may have had to be changed.
const exactName = (k) => DATA.exact.classes[k] ?? A.classes[k];
const exactId = (sample) => DATA.exact.ids[sample] ?? A.ids?.[sample] ?? "";

const numbersOf = (values) => Array.from(values, (v) => num(v, 4)).join(", ");

// The label (or target) of a sample in words; null where the audit does not say.
function labelOf(set, sample) {
  const place = PLACES[set].get(sample);
  if (A.real) return set === "train" ? numbersOf(row(A.targets, place)) : null;
  return name(set === "train" ? GIVEN[sample] : ASKED[place]);
}

const given = (at) => (A.real ? numbersOf(row(S.targets, at)) : name(GIVEN[SUSPECTS[at]]));

const suggested = (at) => (A.real ? numbersOf(row(S.predicted, at)) : name(SUGGESTED[at]));

// ---- neighbours -----------------------------------------------------------------------------------------------------

// The most similar training samples of a suspect: [{sample, place, cosine, differs, suspect}].
function neighboursOf(at) {
  const cosines = row(S.similarity, at);
  return Array.from(row(S.neighbours, at), (sample, k) => ({
    sample,
    place: PLACES.train.get(sample),
    cosine: cosines[k],
    differs: !A.real && GIVEN[sample] !== GIVEN[SUSPECTS[at]],
    suspect: RANK.has(sample) && WRONG[RANK.get(sample)] > 0.5,
  }));
}

// ---- samples in lists -----------------------------------------------------------------------------------------------

// A sample as a tile: what it looks like, its label, its number, and what else is to be said. Opens by itself.
function sampleTile(set, sample, { marked = "", notes = [], words = "" } = {}) {
  const label = labelOf(set, sample);
  const whole = set === "train" ? "training" : "test";
  return el(
    "button",
    {
      type: "button",
      class: `tile ${LOOK.kind === "rows" || LOOK.kind === "nothing" ? "plain" : ""} ${marked}`,
      "aria-label": `${whole} sample ${sample}${label === null ? "" : `, ${what} ${label}`}${words && `, ${words}`}`,
      "data-set": set,
      "data-sample": sample,
      onclick: () => openSample(set, sample),
    },
    look(set, PLACES[set].get(sample), sample, false),
    el(
      "span",
      { class: "caption" },
      label !== null && el("span", { class: "class", title: label }, marked === "strange" && el("b", {}, "≠"), label),
      notes,
      el("span", { class: "index" }, `${set === "test" ? "test " : ""}#${sample}`)
    )
  );
}

// A sample by itself, large.
function openSample(set, sample) {
  const label = labelOf(set, sample);
  const at = set === "train" ? RANK.get(sample) : undefined;
  const title = `${set === "train" ? "Training" : "Test"} sample #${sample}`;
  openWindow(title, title, (leave) => [
    set === "train" && A.ids && el("p", { class: "id" }, A.ids[sample]),
    label !== null && el("p", {}, A.real ? "Target " : "Label ", el("strong", {}, label)),
    look(set, PLACES[set].get(sample), sample, true),
    at !== undefined &&
      el(
        "p",
        {},
        `Number ${count(at + 1)} in the list of suspects. `,
        el("button", { type: "button", class: "link", onclick: leave(() => review({ suspect: at })) }, "Show it there")
      ),
  ]);
}

// The first few of a list, and the others on a click. `make(k)`: the k-th entry.
function some(length, make, first = 12) {
  const list = el("ol", { class: `found ${LOOK.kind}` });
  const fill = (upto) => {
    for (let k = list.children.length; k < Math.min(upto, length); k++) list.append(make(k));
    const left = length - list.children.length;
    more.hidden = !left;
    more.textContent = left ? `Show ${count(left)} more` : "";
  };
  const more = el("button", { type: "button", class: "more", onclick: () => fill(Infinity) });
  fill(length - first <= 3 ? length : first); // a click for one or two more is not worth it
  return [list, more];
}
