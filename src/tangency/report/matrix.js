// A matrix of classes by classes. It scrolls inside its card; what a cell means is said below, also to a finger.

// `rows(i)`: the numbers of a row, the last of them for classes that are not shown; `cell(value)`: a number in words;
// `say(value, row, column)`: a cell in words, the column null for classes that are not shown; `open(row, column)`, if
// there is one, on a click. The node has `draw()`.
function matrix(label, classes, corner, { rows, cell: shown, say, open }) {
  const room = el("div", { class: "wide both", tabindex: 0, role: "region", "aria-label": label });
  const readout = el("p", { class: "caption readout", "aria-hidden": "true" });
  const part = classes.length < CLASSES.length;
  const long = Math.max(...classes.map((k) => name(k).length)) > 3 || classes.length > 12;
  const cell = (value, all, from, to) => {
    const kind = to === from ? "hit" : shown(value) ? "miss" : "none";
    const words = say(value, from, to);
    const style = { "--part": `${Math.round(100 * (value ? 0.12 + 0.88 * Math.sqrt(value / all) : 0))}%` };
    const inside = !shown(value)
      ? "·"
      : open && to !== null
        ? el("button", { type: "button", title: words, "aria-label": words, onclick: () => open(from, to) }, shown(value))
        : el("span", { title: words }, shown(value));
    return el("td", { class: kind, style: shown(value) ? style : null }, inside);
  };
  const line = (from, i) => {
    const numbers = rows(i);
    const all = Math.max(
      1,
      numbers.reduce((a, b) => a + b, 0)
    );
    return el(
      "tr",
      {},
      el("th", { scope: "row", title: name(from) }, el("span", {}, name(from))),
      classes.map((to, j) => cell(numbers[j], all, from, to)),
      part && cell(numbers[classes.length], all, from, null)
    );
  };
  const draw = () =>
    room.replaceChildren(
      el(
        "table",
        { class: `confusion ${long ? "long" : ""}` },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", { class: "corner" }, corner),
            classes.map((c) => el("th", { scope: "col", title: name(c) }, el("span", {}, name(c)))),
            part && el("th", { scope: "col" }, el("span", {}, "other"))
          )
        ),
        el("tbody", {}, classes.map(line))
      )
    );
  // Names that were too long for their place, and counts, are said below, also to a finger, which cannot hover.
  const read = (event) => {
    const found = event.target.closest?.("[title]");
    if (found) readout.textContent = found.title;
  };
  for (const kind of ["pointerover", "pointerdown", "focusin"]) room.addEventListener(kind, read);
  return Object.assign(el("div", {}, room, readout), { draw });
}

// How to see what does not fit.
const scrolled = (classes) =>
  classes.length > 12 && (TOUCH ? " Drag to see the rest; the names stay." : " Scroll to see the rest; the names stay.");
