// The charts of decisions, each a function from numbers to an SVG of a given width. Colours come from charts.css.

// Probabilities at which a log-odds axis is marked: 50%, and powers of ten from both ends, no more than `many`.
function oddsTicks(low, high, many) {
  const word = (power) => {
    if (power === 0) return "50%";
    const far = Math.abs(power);
    const small = far <= 4 ? `${Number((100 * 10 ** -far).toPrecision(1))}%` : `10${raised(-far)}`;
    const large = far <= 4 ? `${(100 - 100 * 10 ** -far).toFixed(Math.max(0, far - 2))}%` : `1−10${raised(-far)}`;
    return power < 0 ? small : large;
  };
  const value = (power) => (power === 0 ? 0 : Math.sign(power) * Math.log(10 ** Math.abs(power) - 1));
  const most = Math.ceil(Math.max(Math.abs(low), Math.abs(high)) / Math.LN10) + 1;
  for (let stride = 1; ; stride++) {
    const found = [];
    for (let power = -most * stride; power <= most * stride; power += stride) {
      const at = value(power);
      if (at >= low && at <= high) found.push({ at, label: word(power) });
    }
    if (found.length <= many) return found;
  }
}

// ---- faithfulness ---------------------------------------------------------------------------------------------------

const dots = (points, r) =>
  points
    .map(([x, y]) => `M${(x - r).toFixed(1)} ${y.toFixed(1)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`)
    .join("");

const crosses = (points, r) =>
  points
    .map(([x, y]) => `M${(x - r).toFixed(1)} ${(y - r).toFixed(1)}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`)
    .join("");

// points: [{x, y, right, at}], `at` the place among the explained samples or undefined; line: [xs, ys].
// `open(at)` on a click; `hover(point or null, x, y)` as the pointer moves; `node.choose(at)` rings a sample.
function scatterChart(width, points, line, { open, hover, title }) {
  const height = Math.round(Math.min(460, Math.max(300, width * 0.72)));
  const box = { left: 54, right: width - 22, top: 30, bottom: height - 44 };
  const spread = (key) => {
    const values = points.map((p) => p[key]);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const pad = Math.max(0.04 * (high - low), 0.5);
    return [low - pad, high + pad];
  };
  const [x0, x1] = spread("x");
  const [y0, y1] = spread("y");
  const sx = linear(x0, x1, box.left, box.right);
  const sy = linear(y0, y1, box.bottom, box.top);
  const place = (p) => [sx(p.x), sy(p.y)];
  const path = [];
  for (let k = 0; k < line[0].length; k++)
    path.push(`${k ? "L" : "M"}${sx(line[0][k]).toFixed(1)} ${sy(line[1][k]).toFixed(1)}`);
  const others = points.filter((p) => p.at === undefined);
  const clip = "clip-scatter";
  const mark = (p) => {
    const [x, y] = place(p);
    const inner = p.right ? dots([[x, y]], 3.4) : crosses([[x, y]], 3.4);
    return svg("path", { d: inner, class: `point ${p.right ? "right" : "wrong"}`, "data-sample": SHOWN[p.at] });
  };
  const ring = svg("circle", { r: 8, class: "ring" });
  const node = frame(
    width,
    height,
    title,
    svg(
      "clipPath",
      { id: clip },
      svg("rect", { x: box.left, y: box.top - 6, width: box.right - box.left + 6, height: box.bottom - box.top + 6 })
    ),
    bottom(
      oddsTicks(x0, x1, (box.right - box.left) / 62).map((t) => ({ x: sx(t.at), words: t.label })),
      box.bottom,
      box.top
    ),
    left(
      oddsTicks(y0, y1, (box.bottom - box.top) / 36).map((t) => ({ y: sy(t.at), words: t.label })),
      box.left,
      box.right
    ),
    label((box.left + box.right) / 2, height - 6, "surrogate’s probability of the true class", {
      "text-anchor": "middle",
      class: "axis",
    }),
    label(0, 14, "network’s probability of the true class", { "text-anchor": "start", class: "axis" }),
    svg("path", { d: dots(others.filter((p) => p.right).map(place), 2.2), class: "point faint right" }),
    svg("path", { d: crosses(others.filter((p) => !p.right).map(place), 2.4), class: "point faint wrong" }),
    points.filter((p) => p.at !== undefined).map(mark),
    svg("path", { d: path.join(""), class: "fit", "clip-path": `url(#${clip})` }),
    ring
  );
  const placed = new Map(points.filter((p) => p.at !== undefined).map((p) => [p.at, p]));
  node.choose = (at) => {
    const p = placed.get(at);
    ring.style.display = p ? "" : "none";
    if (p) filled(ring, { cx: sx(p.x), cy: sy(p.y) }, []);
  };
  // The nearest explained sample within a finger's reach: points are smaller than fingers.
  const nearest = (event) => {
    const where = node.getBoundingClientRect();
    const [ex, ey] = [event.clientX - where.left, event.clientY - where.top];
    let found = null;
    let least = event.pointerType === "touch" ? 26 : 14;
    for (const p of points) {
      if (p.at === undefined) continue;
      const away = Math.hypot(sx(p.x) - ex, sy(p.y) - ey);
      if (away < least) [found, least] = [p, away];
    }
    return found;
  };
  node.addEventListener("click", (event) => {
    const p = nearest(event);
    if (p) open(p.at);
  });
  node.addEventListener("pointermove", (event) => {
    const p = nearest(event);
    node.style.cursor = p ? "pointer" : "default";
    hover(p, p && sx(p.x), p && sy(p.y));
  });
  node.addEventListener("pointerleave", () => hover(null));
  return node;
}

// ---- attribution by class -------------------------------------------------------------------------------------------

// rows as `boxes` gives them. `whole`: the axis reaches the farthest outlier, else the longest whisker.
function boxChart(width, rows, marked, whole, title) {
  const narrow = width < 560;
  const step = rows.length > 14 ? 22 : 27;
  const widest = Math.max(...rows.map((r) => name(r.k).length));
  const box = { left: Math.min(narrow ? 96 : 170, 22 + widest * 7.4), right: width - (narrow ? 64 : 130), top: 26 };
  box.bottom = box.top + rows.length * step + 4;
  const full = rows.filter((r) => !Number.isNaN(r.median));
  const values = full.flatMap((r) => [r.low, r.high, r.mean, ...(whole ? r.fliers : [])]);
  let [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
  if (low === high) high = low + 1;
  const pad = 0.03 * (high - low);
  const sx = linear(low - pad, high + pad, box.left, box.right);
  const fits = (words) =>
    words.length * 7.4 + 22 > box.left ? `${words.slice(0, Math.floor((box.left - 30) / 7.4))}…` : words;
  const lines = rows.map((r, place) => {
    const y = box.top + place * step + step / 2 + 2;
    const half = Math.min(8, step / 2 - 4);
    const tag = marked(r.k);
    const side = [
      svg(
        "text",
        { x: box.left - 10, y: y + 4, "text-anchor": "end", class: `name ${tag}` },
        svg("title", {}, name(r.k)),
        fits(name(r.k))
      ),
      label(width - (narrow ? 2 : 66), y + 4, Number.isNaN(r.median) ? "–" : signed(r.sum), {
        "text-anchor": "end",
        class: "value",
      }),
      !narrow && label(width - 2, y + 4, count(r.outliers), { "text-anchor": "end", class: "tick" }),
    ];
    if (Number.isNaN(r.median)) return svg("g", {}, side);
    const words =
      `${name(r.k)}: mean ${num(r.mean)}, median ${num(r.median)}, quartiles ${num(r.q1)} to ${num(r.q3)}, ` +
      `${plural(r.outliers, "outlier")}; sum ${signed(r.sum)}`;
    return svg(
      "g",
      { class: `boxrow ${tag}`, "data-class": r.k },
      svg("title", {}, words),
      svg("rect", { x: box.left, y: y - step / 2, width: box.right - box.left, height: step, class: "hit" }),
      whole &&
        svg("path", {
          d: dots(
            r.fliers.map((f) => [sx(f), y]),
            2
          ),
          class: "flier",
        }),
      svg("line", { x1: sx(r.low), x2: sx(r.high), y1: y, y2: y, class: "whisker" }),
      svg("rect", {
        x: sx(r.q1),
        y: y - half,
        width: Math.max(1, sx(r.q3) - sx(r.q1)),
        height: 2 * half,
        class: "box",
      }),
      svg("line", { x1: sx(r.median), x2: sx(r.median), y1: y - half, y2: y + half, class: "median" }),
      svg("line", { x1: sx(r.mean), x2: sx(r.mean), y1: y - half - 3, y2: y + half + 3, class: "mean" }),
      side
    );
  });
  const marks = ticks(low, high, (box.right - box.left) / (narrow ? 52 : 74)).map((t) => ({
    x: sx(t),
    words: num(t, 2),
  }));
  return frame(
    width,
    box.bottom + 24,
    title,
    bottom(marks, box.bottom, box.top),
    svg("line", { x1: sx(0), x2: sx(0), y1: box.top, y2: box.bottom, class: "zero" }),
    label(width - (narrow ? 2 : 66), 14, "sum", { "text-anchor": "end", class: "tick" }),
    !narrow && label(width - 2, 14, "outliers", { "text-anchor": "end", class: "tick" }),
    lines
  );
}

// ---- the kernel itself ----------------------------------------------------------------------------------------------

// lines: [{place, value, chosen, name}]; each over its largest value.
function spectrumChart(width, lines, classes, title) {
  const height = Math.round(Math.min(400, Math.max(260, width * 0.72)));
  const box = { left: 50, right: width - 14, top: 14, bottom: height - 42 };
  const drawn = lines.filter((l) => l.place.length > 0);
  const last = Math.max(2, ...drawn.map((l) => l.place[l.place.length - 1]));
  // Sixteen powers of ten below the largest is where rounding, not the kernel, decides.
  const least = Math.max(1e-16, Math.min(0.1, ...drawn.flatMap((l) => Array.from(l.value, (v) => v / l.value[0]))));
  const floor = Math.floor(Math.log10(least));
  const sx = linear(0, Math.log10(last), box.left, box.right);
  const sy = linear(floor, 0, box.bottom, box.top);
  const powers = (low, high, most) => {
    const step = Math.max(1, Math.ceil((high - low) / most));
    return Array.from({ length: Math.floor((high - low) / step) + 1 }, (_, k) => low + k * step);
  };
  const path = (l) => {
    const points = [];
    l.place.forEach((at, k) => {
      const y = l.value[k] / l.value[0];
      if (y >= 10 ** floor)
        points.push(`${points.length ? "L" : "M"}${sx(Math.log10(at)).toFixed(1)} ${sy(Math.log10(y)).toFixed(1)}`);
    });
    return svg(
      "path",
      { d: points.join(""), class: l.chosen ? "spectrum chosen" : "spectrum" },
      svg("title", {}, l.name)
    );
  };
  const late = Math.log10(classes) > 0.6 * Math.log10(last);
  const word = (k) => (Math.abs(k) <= 3 ? count(10 ** k) : `10${raised(k)}`);
  return frame(
    width,
    height,
    title,
    bottom(
      powers(0, Math.floor(Math.log10(last)), 6).map((k) => ({ x: sx(k), words: word(k) })),
      box.bottom,
      box.top
    ),
    left(
      powers(floor, 0, 8).map((k) => ({ y: sy(k), words: k === 0 ? "1" : `10${raised(k)}` })),
      box.left,
      box.right
    ),
    classes <= last && [
      svg("line", {
        x1: sx(Math.log10(classes)),
        x2: sx(Math.log10(classes)),
        y1: box.top,
        y2: box.bottom,
        class: "classes",
      }),
      label(sx(Math.log10(classes)) + (late ? -5 : 5), box.bottom - 8, `${classes} classes`, {
        class: "tick",
        "text-anchor": late ? "end" : "start",
      }),
    ],
    drawn.filter((l) => !l.chosen).map(path),
    drawn.filter((l) => l.chosen).map(path),
    label((box.left + box.right) / 2, height - 6, "number of the eigenvalue", {
      "text-anchor": "middle",
      class: "axis",
    })
  );
}

// Magma at nine places; between them straight lines, which no eye can tell from the original.
const MAGMA = [
  [0, 0, 4],
  [28, 16, 68],
  [79, 18, 123],
  [129, 37, 129],
  [181, 54, 122],
  [229, 80, 100],
  [251, 135, 97],
  [254, 194, 135],
  [252, 253, 191],
];

function magma(part) {
  const at = Math.min(7.999, Math.max(0, part * 8));
  const k = Math.floor(at);
  return MAGMA[k].map((v, c) => Math.round(v + (at - k) * (MAGMA[k + 1][c] - v)));
}

// A picture of bytes [side, side] as a canvas.
function heat(shades, side, title) {
  const canvas = el("canvas", { width: side, height: side, role: "img", "aria-label": title, class: "heat" });
  const context = canvas.getContext("2d");
  const image = context.createImageData(side, side);
  const colours = Array.from({ length: 256 }, (_, k) => magma(k / 255));
  shades.forEach((v, k) => image.data.set([...colours[v], 255], 4 * k));
  context.putImageData(image, 0, 0);
  return canvas;
}
