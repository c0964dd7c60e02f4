// How two data sets differ, as the file carries it. A sample is meant by its set ("train" is the source, "test" the
// target, as for pictures) and its number.

const D = DATA.shift;
const SIDES = ["train", "test"];
const SIDE = { train: D.names[0], test: D.names[1] };
const ROLE = { train: "source", test: "target" };
const LETTER = { train: "a", test: "b" }; // classes of style
const POINTS = { train: D.source, test: D.target };
const RATIO = array(D.ratio); // of every source sample
const C = Object.fromEntries(
  ["distance", "difference", "spread", "ks", "p", "explained"].map((k) => [k, array(D.components[k])])
);

// P-values of permutations have no digits beyond these.
const pValue = (p) => (missing(p) ? "–" : p < 1e-4 ? num(p, 2) : String(Number(p.toPrecision(2))));

const differs = (p) => p <= D.level;

const labelName = (set, sample) => {
  const labels = POINTS[set].labels;
  return labels ? D.classes.names[array(labels)[PLACES[set].get(sample)]] : null;
};

// A sample as a tile; opens by itself.
function sampleTile(set, sample, amount, hint) {
  const label = labelName(set, sample);
  return el(
    "button",
    {
      type: "button",
      class: `tile ${LOOK.kind === "rows" || LOOK.kind === "nothing" ? "plain" : ""}`,
      "aria-label": `${SIDE[set]}, sample ${sample}${label === null ? "" : `, label ${label}`}, ${hint}`,
      "data-set": set,
      "data-sample": sample,
      onclick: () => openSample(set, sample, hint),
    },
    look(set, PLACES[set].get(sample), sample, false),
    el(
      "span",
      { class: "caption" },
      label !== null && el("span", { class: "class", title: label }, label),
      el("span", { class: "amount", title: hint }, amount),
      el("span", { class: "index" }, `#${sample}`)
    )
  );
}

// A sample by itself, large.
function openSample(set, sample, hint) {
  const label = labelName(set, sample);
  const title = `${SIDE[set]}, sample #${sample}`;
  const place = PLACES[set].get(sample);
  openWindow(title, title, () => [
    POINTS[set].ids && el("p", { class: "id" }, POINTS[set].ids[place]),
    label !== null && el("p", {}, "Label ", el("strong", {}, label)),
    el("p", { class: "caption" }, hint),
    PICTURES ? picture(set, place, title) : look(set, place, sample, true),
  ]);
}

// The first few of a list, and the others on a click. `make(k)`: the k-th entry.
function someOf(length, make, first = 12) {
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

// How a log ratio of densities reads.
function likelier(ratio) {
  const times = Math.exp(Math.abs(ratio));
  const how = times > 1e4 ? "more than 10,000" : times >= 10 ? count(Math.round(times)) : times.toFixed(1);
  return `${how} times likelier in ${ratio > 0 ? SIDE.test : SIDE.train}`;
}
