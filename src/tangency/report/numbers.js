// The numbers of the decisions, by sample and kernel.

const N = DATA.numbers;
const VIEWS = N.views;
const SHOWN = array(N.shown); // test samples that are explained one by one, by their number
const TRUTH = array(N.truth);
const SAID = array(N.said);
const POISONED = N.poisoned && array(N.poisoned);
const PLACE = new Map(Array.from(SHOWN, (index, at) => [index, at]));
const TRAIN = {
  index: array(N.train.index),
  truth: array(N.train.truth),
  poisoned: N.train.poisoned && array(N.train.poisoned),
};

const best = VIEWS.reduce((a, v, k) => ((v.faithful.tau ?? -2) > (VIEWS[a].faithful.tau ?? -2) ? k : a), 0);

// Probabilities of one sample: [{k, network, surrogate}] and what is left for the classes that are not listed.
function probabilities(at, view) {
  const kept = row(N.kept, at);
  const network = row(N.probability, at);
  const surrogate = row(VIEWS[view].probability, at);
  const found = Array.from(kept, (k, place) => ({ k, network: network[place], surrogate: surrogate[place] }));
  const all = kept.length === CLASSES.length;
  if (!all) found.sort((a, b) => b.network - a.network);
  const rest = (key) => Math.max(0, 1 - found.reduce((sum, p) => sum + p[key], 0));
  return { found, rest: all ? null : { network: rest("network"), surrogate: rest("surrogate") } };
}

function probability(at, view, k, who) {
  const found = probabilities(at, view).found.find((p) => p.k === k);
  return found ? found[who] : null;
}

// Training samples for a sample: [{place, index, truth, poisoned, value, cosine}]; `kind`: similar, helpful, harmful.
function neighbours(at, view, kind, output) {
  const [places, values, cosines] = VIEWS[view].lists[kind];
  const leading = kind === "similar" ? [at] : [at, output];
  const numbers = row(values, ...leading);
  const cosine = cosines ? row(cosines, ...leading) : null;
  return Array.from(row(places, ...leading), (place, k) => ({
    ...training(place),
    value: numbers[k],
    cosine: cosine ? cosine[k] : null,
  }));
}

function training(place) {
  return {
    place,
    index: TRAIN.index[place],
    truth: TRAIN.truth[place],
    poisoned: Boolean(TRAIN.poisoned && TRAIN.poisoned[place]),
  };
}

// The explained samples in whose lists, for what the network said, a training sample is: {similar: [at, …], …}.
function mentions(place, view) {
  const found = {};
  for (const [kind, [places]] of Object.entries(VIEWS[view].lists)) {
    const all = array(places);
    const each = all.length / SHOWN.length;
    const inside = new Set();
    const first = places.shape[places.shape.length - 1]; // of each sample the lists of the first output come first
    all.forEach((p, k) => p === place && k % each < first && inside.add(Math.floor(k / each)));
    found[kind] = [...inside];
  }
  return found;
}

// Attributions by class for one output: [{k, whiskers…, mean, fliers, sum, outliers}], the rest and the total.
function boxes(at, view, output) {
  const b = VIEWS[view].boxes;
  const numbers = row(b.values, at, output);
  const each = b.values.shape[3];
  const sums = row(b.sums, at, output);
  const outliers = row(b.outliers, at, output);
  const rows = Array.from(row(b.classes, at, output), (k, place) => {
    const [low, q1, median, q3, high, mean, ...fliers] = numbers.subarray(place * each, (place + 1) * each);
    return {
      k,
      low,
      q1,
      median,
      q3,
      high,
      mean,
      fliers: fliers.filter((f) => !Number.isNaN(f)),
      sum: sums[place],
      outliers: outliers[place],
    };
  });
  return {
    rows,
    rest: b.all ? null : row(b.rest, at)[output],
    total: row(VIEWS[view].totals, at)[output],
  };
}

// What the search looks through, besides number and classes.
function searchable(at) {
  if (LOOK.kind === "texts") return text("test", at).toLowerCase();
  return "";
}
