// What the file carries: one JSON text; large arrays in base64, unpacked when they are first looked at.

const DATA = JSON.parse(by("data").textContent);
const { about: ABOUT, look: LOOK } = DATA;
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

const CLASSES = (DATA.numbers ?? DATA.audit)?.classes ?? [];
const name = (k) => CLASSES[k] || "(no name)";
