// What the file carries: one JSON text; large arrays in base64, unpacked when they are first looked at.

const DATA = JSON.parse(by("data").textContent);
const { about: ABOUT, look: LOOK, numbers: N } = DATA;
const LITTLE = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1;
const TYPES = { f4: Float32Array, u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i2: Int16Array };
const unpacked = new Map();

function bytes(text) {
  const raw = atob(text);
  const out = new Uint8Array(raw.length);
  for (let k = 0; k < raw.length; k++) out[k] = raw.charCodeAt(k);
  return out;
}

// The numbers of a packed array as a typed array; pack.py writes them.
function array(packed) {
  if (!unpacked.has(packed)) {
    const raw = bytes(packed.data);
    const kind = TYPES[packed.type];
    if (!LITTLE)
      for (let k = 0; k < raw.length; k += kind.BYTES_PER_ELEMENT)
        raw.subarray(k, k + kind.BYTES_PER_ELEMENT).reverse();
    unpacked.set(packed, new kind(raw.buffer));
  }
  return unpacked.get(packed);
}

// One row of an array of two or more dimensions; `at` are its leading indices.
function row(packed, ...at) {
  const inner = packed.shape.slice(at.length).reduce((a, b) => a * b, 1);
  let start = 0;
  at.forEach((k, dim) => (start = start * packed.shape[dim] + k));
  const all = array(packed);
  if (packed.type !== "i2") return all.subarray(start * inner, (start + 1) * inner);
  const low = array(packed.low)[start];
  const step = array(packed.step)[start];
  return Float64Array.from(all.subarray(start * inner, (start + 1) * inner), (v) =>
    v === -32768 ? NaN : low + step * v
  );
}

const CLASSES = N.classes;
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

const name = (k) => CLASSES[k];
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

// ---- what samples look like -----------------------------------------------------------------------------------------

const PICTURES = LOOK.kind === "pictures";
const sheets = { test: [], train: [] };

// Decoded once and kept: drawing a picture is then a copy.
async function decode() {
  if (!PICTURES) return;
  for (const set of ["test", "train"]) {
    sheets[set] = await Promise.all(
      LOOK[set].files.map((f) => createImageBitmap(new Blob([bytes(f.data)], { type: f.mime })))
    );
    for (const file of LOOK[set].files) file.data = null; // the text is not needed any more
  }
}

// A canvas of the picture's own pixels; CSS makes it large and keeps the pixels crisp. With a label it is an image for
// screen readers, without one it is decoration.
function picture(set, place, label) {
  const { size, cell, across, per } = LOOK[set];
  const canvas = el("canvas", {
    width: size[1],
    height: size[0],
    class: Math.max(...size) > 64 ? "pixels smooth" : "pixels",
    role: label ? "img" : null,
    "aria-label": label || null,
    "aria-hidden": label ? null : "true",
  });
  const at = place % per;
  const [x, y] = [(at % across) * cell[1], Math.floor(at / across) * cell[0]];
  const sheet = sheets[set][Math.floor(place / per)];
  canvas.getContext("2d").drawImage(sheet, x, y, size[1], size[0], 0, 0, size[1], size[0]);
  return canvas;
}

const text = (set, place) => LOOK[set][place];

const cells = (set, place) => row(LOOK[set], place);

// What the search looks through, besides number and classes.
function searchable(at) {
  if (LOOK.kind === "texts") return text("test", at).toLowerCase();
  return "";
}
