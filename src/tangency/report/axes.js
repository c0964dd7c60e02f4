// What all charts are made of: scales, ticks, and the frame around them.

const linear = (d0, d1, r0, r1) => (v) => r0 + ((v - d0) / (d1 - d0 || 1)) * (r1 - r0);

// Round numbers between low and high, about `many` of them.
function ticks(low, high, many) {
  const raw = (high - low) / Math.max(1, many);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step + 0); // −0 is 0
  return found;
}

const label = (x, y, words, attributes) => svg("text", { x, y, ...attributes }, words);

// An axis line is left out: the grid says enough.
function bottom(positions, y, top) {
  return positions.map(({ x, words }) => [
    svg("line", { x1: x, x2: x, y1: top, y2: y, class: "grid" }),
    label(x, y + 16, words, { "text-anchor": "middle", class: "tick" }),
  ]);
}

function left(positions, x, right) {
  return positions.map(({ y, words }) => [
    svg("line", { x1: x, x2: right, y1: y, y2: y, class: "grid" }),
    label(x - 6, y + 4, words, { "text-anchor": "end", class: "tick" }),
  ]);
}

function frame(width, height, title, ...children) {
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, children);
}
