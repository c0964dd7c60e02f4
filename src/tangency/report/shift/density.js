// Gaussian kernel density estimates with Scott's bandwidth, along one component and over two.

const GRID = 64;

const spaced = (low, high) => Array.from({ length: GRID }, (_, k) => low + ((high - low) * k) / (GRID - 1));

function width(z, dimensions, least) {
  const mean = z.reduce((a, b) => a + b, 0) / z.length;
  const deviation = Math.sqrt(z.reduce((a, b) => a + (b - mean) ** 2, 0) / z.length);
  return Math.max(deviation * z.length ** (-1 / (4 + dimensions)), least);
}

// Each sample's Gaussian at each place: an array for each place.
function bumps(z, at, dimensions) {
  const h = width(z, dimensions, at[1] - at[0]);
  return at.map((x) => Float64Array.from(z, (v) => Math.exp(-(((x - v) / h) ** 2) / 2) / (h * Math.sqrt(2 * Math.PI))));
}

const densityLine = (z, at) => bumps(z, at, 1).map((row) => row.reduce((a, b) => a + b, 0) / z.length);

// heights[i][j] at (xs[i], ys[j]).
function densityPlane(x, y, xs, ys) {
  const [bx, by] = [bumps(x, xs, 2), bumps(y, ys, 2)];
  return bx.map((row) =>
    by.map((column) => {
      let total = 0;
      for (let k = 0; k < row.length; k++) total += row[k] * column[k];
      return total / x.length;
    })
  );
}

// Heights above which these parts of the samples lie.
function levelsOf(heights, parts) {
  const falling = heights.flat().sort((a, b) => b - a);
  const total = falling.reduce((a, b) => a + b, 0);
  return parts.map((part) => {
    let held = 0;
    for (const height of falling) {
      held += height;
      if (held >= part * total) return height;
    }
    return falling[falling.length - 1];
  });
}

// The line where the heights pass a level, as the path of an SVG: marching squares, each cell by itself.
function contour(heights, level, px, py) {
  const parts = [];
  const cut = (a, b) => (level - a) / (b - a);
  for (let i = 0; i + 1 < heights.length; i++)
    for (let j = 0; j + 1 < heights[i].length; j++) {
      const [a, b, c, d] = [heights[i][j], heights[i + 1][j], heights[i + 1][j + 1], heights[i][j + 1]];
      const found = [];
      if (a > level !== b > level) found.push([px(i + cut(a, b)), py(j)]);
      if (b > level !== c > level) found.push([px(i + 1), py(j + cut(b, c))]);
      if (c > level !== d > level) found.push([px(i + 1 - cut(c, d)), py(j + 1)]);
      if (d > level !== a > level) found.push([px(i), py(j + 1 - cut(d, a))]);
      for (let k = 0; k + 1 < found.length; k += 2)
        parts.push(
          `M${found[k].map((v) => v.toFixed(1)).join(" ")}L${found[k + 1].map((v) => v.toFixed(1)).join(" ")}`
        );
    }
  return parts.join("");
}
