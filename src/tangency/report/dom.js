// Elements and numbers. Text is only ever set as text, never as markup: names and texts of the data cannot become code.

const SVG = "http://www.w3.org/2000/svg";

// el("button", {class: "chip", onclick: f}, "All") — attributes that are null or false are left out.
function el(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([k, v]) => node.style.setProperty(k, v));
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const by = (id) => document.getElementById(id);

// A group of buttons of which one is pressed. `options`: [{key, label, title}]; `choose(key)` is called on a click.
function choice(label, options, choose, { kind = "choice" } = {}) {
  const buttons = options.map((option) =>
    el(
      "button",
      {
        type: "button",
        title: option.title,
        "data-key": option.key,
        "aria-pressed": "false",
        onclick: () => choose(option.key),
      },
      option.label
    )
  );
  const node = el("div", { class: kind, role: "group", "aria-label": label }, buttons);
  node.press = (key) => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.key === String(key)));
  };
  return node;
}

// Draws again when the room changes. The width is compared, since drawing changes the height.
function sized(node, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (node.clientWidth !== width) {
      width = node.clientWidth;
      draw();
    }
  }).observe(node);
}

// ---- numbers in words -----------------------------------------------------------------------------------------------

const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

const raised = (k) => String(k).replace(/./g, (c) => RAISED[c]);

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

// Three significant digits: 12.3, −0.0421, 3.1·10⁻⁶.
function num(value, digits = 3) {
  if (missing(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e5) {
    const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
    return value.toFixed(Math.min(places, 8)).replace("-", "−");
  }
  const [head, power] = value.toExponential(digits - 2).split("e");
  return `${head.replace("-", "−")}·10${raised(Number(power))}`;
}

const signed = (value, digits = 3) => (value > 0 ? "+" : "") + num(value, digits);

const count = (value) => (missing(value) ? "–" : value.toLocaleString("en-US"));

const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

// 93.2%, and near the ends so that 0% and 100% mean just that.
function percent(p) {
  if (missing(p)) return "–";
  const value = 100 * p;
  if (value === 0 || value === 100) return `${value}%`;
  if (value < 0.05) return "<0.1%";
  if (value > 99.95) return ">99.9%";
  return `${value.toFixed(1)}%`;
}

function seconds(value) {
  if (missing(value)) return "–";
  if (value < 60) return `${num(value, 2)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}
