// A training's record: the verdict, a curve for each quantity, a table. Text is only ever set as text.

const DATA = JSON.parse(document.getElementById("data").textContent);
const STEPS = DATA.steps;

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

// Three significant digits: 12.3, −0.0421, 3.1·10⁻⁶.
function num(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e5) {
    const text = value.toFixed(Math.min(8, Math.max(0, 2 - Math.floor(Math.log10(size)))));
    return (text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text).replace("-", "−");
  }
  const [head, power] = value.toExponential(1).split("e");
  const factor = head === "1.0" ? "" : `${head.replace(/\.0$/, "").replace("-", "−")}·`;
  return `${factor}10${String(Number(power)).replace(/./g, (c) => RAISED[c])}`;
}

const scale = (d0, d1, r0, r1) => (v) => r0 + ((v - d0) / (d1 - d0 || 1)) * (r1 - r0);

// Round numbers between low and high, about `many` of them.
function ticks(low, high, many) {
  const raw = (high - low) / Math.max(1, many);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step + 0);
  return found;
}

// ---- the verdict ----------------------------------------------------------------------------------------------------

const KINDS = { lazy: "Lazy", "in between": "In between", rich: "Rich" };

// Where the kernel's change lies between the thresholds, on a logarithmic scale.
function gauge(change, lazy, rich) {
  const [low, high] = [Math.log10(lazy / 30), Math.log10(Math.max(rich * 30, change * 1.2))];
  const at = (v) => Math.max(0, scale(low, high, 0, 100)(Math.log10(Math.max(v, 1e-300))));
  const zones = [
    ["lazy", "lazy", 0, at(lazy)],
    ["between", "", at(lazy), at(rich)],
    ["rich", "rich", at(rich), 100],
  ];
  const placed = (node, left, width) => {
    node.style.left = `${left}%`;
    if (width !== undefined) node.style.width = `${width}%`;
    return node;
  };
  return el(
    "div",
    {
      class: "gauge",
      role: "img",
      "aria-label": `change of the kernel ${num(change)}; lazy up to ${lazy}, rich from ${rich}`,
    },
    zones.map(([kind, word, from, to]) => placed(el("span", { class: `zone ${kind}` }, word), from, to - from)),
    [lazy, rich].map((v) => placed(el("span", { class: "mark" }, num(v)), at(v))),
    placed(el("span", { class: "needle" }, "▼"), at(change))
  );
}

function verdict() {
  const found = DATA.verdict;
  if (!found)
    return el("section", { class: "card" }, el("p", { class: "why" }, "The kernel’s change is not known: no verdict."));
  const kind = found.kind === "in between" ? "between" : found.kind;
  return el(
    "section",
    { class: `card ${kind}`, id: "verdict" },
    el("p", { class: "word" }, KINDS[found.kind]),
    el("p", { class: "why" }, `${found.why[0].toUpperCase()}${found.why.slice(1)}.`),
    gauge(found.numbers.change, found.lazy.change, found.rich.change),
    el(
      "p",
      { class: "caption" },
      `Change of the kernel, ‖Θ_t − Θ_0‖ / ‖Θ_0‖. Thresholds are heuristics: lazy is a kernel that stayed within ` +
        `${num(100 * found.lazy.change)} % of where it began, rich one that changed by ${num(100 * found.rich.change)} % ` +
        `and whose top eigenspace turned by ${num(found.rich.rotation)}° at least.`
    )
  );
}

// ---- curves ---------------------------------------------------------------------------------------------------------

const movers = []; // each shows the record at a place

function show(place) {
  for (const move of movers) move(place);
}

// Each curve as rows [value by step], one row where it is a single number.
function rows(curve) {
  const many = curve.values.some(Array.isArray);
  if (!many) return [curve.values];
  const longest = Math.max(...curve.values.map((v) => (Array.isArray(v) ? v.length : 0)));
  return Array.from({ length: longest }, (_, k) => curve.values.map((v) => (Array.isArray(v) ? v[k] : null)));
}

function path(xs, ys) {
  let text = "";
  let pen = "M";
  ys.forEach((y, k) => {
    if (y === null) {
      pen = "M"; // a gap where nothing finite was recorded
      return;
    }
    text += `${pen}${xs[k].toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
  });
  return text;
}

function chart(curve) {
  const [width, height] = [340, 190];
  const box = { left: 52, right: width - 12, top: 12, bottom: height - 26 };
  const lines = rows(curve);
  const all = lines.flat().filter((v) => v !== null);
  const positive = all.filter((v) => v > 0);
  const log = lines.length > 1 && positive.length === all.length && Math.max(...all) > 100 * Math.min(...all);
  const put = (v) => (v === null || v === undefined ? null : log ? Math.log10(v) : v);
  let [low, high] = all.length ? [Math.min(...all.map(put)), Math.max(...all.map(put))] : [0, 1];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const sx = scale(STEPS[0], STEPS[STEPS.length - 1], box.left, box.right);
  const sy = scale(low, high, box.bottom, box.top);
  const xs = STEPS.map((step) => sx(step));
  const places = lines.map((line) => line.map((v) => (put(v) === null ? null : sy(put(v)))));
  const marks = ticks(low, high, 4).filter((t) => !log || Number.isInteger(t));
  const cursor = svg("line", { y1: box.top, y2: box.bottom, class: "cursor" });
  const dots = lines.map(() => svg("circle", { r: lines.length > 1 ? 2.2 : 4, class: "dot" }));
  const now = el("p", { class: "now" });
  const first = lines[0] || [];
  const node = svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `${curve.title}: ${num(first[0])} at step ${STEPS[0]}, ${num(first[first.length - 1])} at step ${
        STEPS[STEPS.length - 1]
      }`,
    },
    marks.map((t) => [
      svg("line", { x1: box.left, x2: box.right, y1: sy(t), y2: sy(t), class: "grid" }),
      svg("text", { x: box.left - 6, y: sy(t) + 4, "text-anchor": "end" }, num(log ? 10 ** t : t)),
    ]),
    ticks(STEPS[0], STEPS[STEPS.length - 1], 4)
      .filter(Number.isInteger)
      .map((t) => svg("text", { x: sx(t), y: height - 8, "text-anchor": "middle" }, t.toLocaleString("en-US"))),
    places.map((ys) => svg("path", { d: path(xs, ys), class: lines.length > 1 ? "path many" : "path" })),
    cursor,
    dots
  );
  movers.push((place) => {
    cursor.setAttribute("x1", xs[place]);
    cursor.setAttribute("x2", xs[place]);
    dots.forEach((dot, k) => {
      const y = places[k][place];
      dot.setAttribute("visibility", y === null ? "hidden" : "visible");
      dot.setAttribute("cx", xs[place]);
      dot.setAttribute("cy", y === null ? 0 : y);
    });
    const several = lines.length > 1 ? ", the largest" : "";
    now.replaceChildren(`step ${STEPS[place].toLocaleString("en-US")}${several}: `, el("b", {}, num(first[place])));
  });
  node.addEventListener("pointermove", (event) => {
    const at = ((event.clientX - node.getBoundingClientRect().left) / node.getBoundingClientRect().width) * width;
    let best = 0;
    xs.forEach((x, k) => (best = Math.abs(x - at) < Math.abs(xs[best] - at) ? k : best));
    scrub.value = best;
    show(best);
  });
  return el("section", { class: "card curve", "data-name": curve.name }, el("h2", {}, curve.title), now, node);
}

const scrub = el("input", {
  type: "range",
  min: 0,
  max: STEPS.length - 1,
  value: STEPS.length - 1,
  id: "scrub",
  oninput: () => show(Number(scrub.value)),
});

// ---- the rest -------------------------------------------------------------------------------------------------------

function table() {
  const last = STEPS.slice(-50);
  const from = STEPS.length - last.length;
  const cell = (value) => el("td", {}, num(Array.isArray(value) ? value[0] : value));
  return el(
    "details",
    { class: "card" },
    el("summary", {}, STEPS.length > 50 ? "The last 50 records" : "All records"),
    el(
      "div",
      { class: "wide", tabindex: 0, role: "region", "aria-label": "records" },
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "step"),
          DATA.curves.map((c) => el("th", { scope: "col" }, c.name)))),
        el("tbody", {}, last.map((step, k) =>
          el("tr", {}, el("th", { scope: "row" }, step), DATA.curves.map((c) => cell(c.values[from + k])))))
      )
    )
  );
}

// Loads the page again, unless somebody is reading: a button holds it, and the choice lasts while the window does.
function live() {
  if (DATA.ended) return el("p", { class: "state" }, "the run has ended");
  if (!DATA.refresh) return el("p", { class: "state" }, "as the log was when this page was written");
  let held = false;
  try {
    held = sessionStorage.getItem("tangency-held") === "yes";
  } catch {
    // a browser that remembers nothing begins anew each time
  }
  const button = el("button", { type: "button", id: "hold" });
  const words = () => {
    button.textContent = held ? "Go on" : "Hold";
    button.setAttribute("aria-pressed", String(held));
  };
  button.addEventListener("click", () => {
    held = !held;
    try {
      sessionStorage.setItem("tangency-held", held ? "yes" : "no");
    } catch {
      // likewise
    }
    words();
  });
  words();
  setInterval(() => held || location.reload(), 1000 * DATA.refresh);
  return el("p", { class: "state" }, `loads again every ${num(DATA.refresh)} s`, button);
}

const main = document.getElementById("main");
main.append(
  el("div", { class: "head" }, el("h1", {}, `${DATA.model} at step ${STEPS[STEPS.length - 1].toLocaleString("en-US")}: ` +
    "lazy or rich?"), live()),
  verdict(),
  el("div", { class: "scrub card" }, el("label", { for: "scrub" }, "Step"), scrub),
  el("div", { class: "curves" }, DATA.curves.map(chart)),
  table(),
  el(
    "section",
    { class: "card" },
    el("h2", {}, "How it was recorded"),
    el("dl", { class: "facts" }, Object.entries(DATA.facts).map(([k, v]) => [el("dt", {}, k), el("dd", {}, String(v))])),
    DATA.notes.length ? el("ul", { class: "caption" }, DATA.notes.map((note) => el("li", {}, note))) : null,
    el("p", { class: "caption" }, `tangency ${DATA.version}`)
  )
);
show(STEPS.length - 1);
document.documentElement.dataset.ready = "yes";
