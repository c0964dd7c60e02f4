// What samples look like: pictures, texts, rows of a table, or nothing but their numbers.

// The numbers of the samples that have a place on the page, and the place of each number.
const NUMBERS = { test: array(DATA.places.test), train: array(DATA.places.train) };
const PLACES = Object.fromEntries(
  Object.entries(NUMBERS).map(([set, numbers]) => [set, new Map(Array.from(numbers, (index, at) => [index, at]))])
);
const thing = { pictures: "images", texts: "texts", rows: "rows", nothing: "samples" }[LOOK.kind];

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

// What a sample looks like, large or small.
function look(set, place, index, large) {
  if (PICTURES) return picture(set, place, large ? `${set} sample ${index}` : null);
  if (LOOK.kind === "texts") return el("p", { class: "text" }, text(set, place));
  if (LOOK.kind === "rows" && large) {
    const values = cells(set, place);
    return el(
      "div",
      { class: "wide", tabindex: 0, role: "region", "aria-label": "Values of the sample" },
      el(
        "table",
        { class: "cells" },
        el(
          "tbody",
          {},
          LOOK.columns.map((c, k) => el("tr", {}, el("th", { scope: "row" }, c), el("td", {}, num(values[k], 4))))
        )
      )
    );
  }
  return null;
}
