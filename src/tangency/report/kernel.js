// What the chosen kernel looks like: its matrix over the training samples, and its eigenvalues.

function kernelItself() {
  const gram = el("div", { class: "gram" });
  const spectrum = el("div", { class: "chart" });
  const title = el("h3", {});
  const note = el("p", { class: "caption" });
  const drawGram = () => {
    const g = VIEWS[state.view].gram;
    title.textContent = `Kernel matrix of the training samples: ${VIEWS[state.view].name}`;
    gram.replaceChildren(...gramPicture(g, VIEWS[state.view].name));
  };
  const drawSpectrum = () => {
    const lines = VIEWS.map((v, k) => ({
      name: v.name,
      place: array(v.spectrum.place),
      value: array(v.spectrum.value),
      chosen: k === state.view,
    }));
    const s = VIEWS[state.view].spectrum;
    const first = array(s.value)[0];
    const lost = s.count - s.positive;
    spectrum.replaceChildren(
      s.count
        ? spectrumChart(
            spectrum.clientWidth || 480,
            lines,
            CLASSES.length,
            `Eigenvalues of the ${VIEWS[state.view].name} kernel matrix over the largest, both axes logarithmic`
          )
        : el("p", { class: "empty" }, "No eigenvalues were computed for this kernel.")
    );
    note.textContent =
      `${plural(s.count, "eigenvalue")} of ${VIEWS[state.view].name} over the largest, ${num(first)}` +
      `${VIEWS.length > 1 ? "; the other kernels in gray" : ""}. ` +
      (lost > 0 ? `${count(lost)} at or below zero (rounding) cannot be drawn. ` : "") +
      "A fast fall means that few directions carry the decisions.";
  };
  watch(["view"], () => {
    drawGram();
    drawSpectrum();
  });
  sized(spectrum, drawSpectrum);
  return section(
    "kernel",
    "What the kernel sees",
    "A kernel says how alike two samples are to the network. Bright squares on the diagonal are classes " +
      "that hang together; bright patches off it are classes that the network finds alike.",
    el(
      "div",
      { class: "two" },
      el("div", { class: "card" }, title, gram),
      el("div", { class: "card" }, el("h3", {}, "Spectrum"), spectrum, note)
    )
  );
}

function gramPicture(g, kernel) {
  const side = g.shades.shape[0];
  const shades = array(g.shades);
  const spans = g.ends.map((end, k) => ({ k, from: k ? g.ends[k - 1] : 0, to: end })).filter((s) => s.to > s.from);
  const many = spans.length > 24;
  const border = (s) => [
    el("i", { class: "h", style: { top: `${100 * s.to}%` } }),
    el("i", { class: "v", style: { left: `${100 * s.to}%` } }),
  ];
  const named = many ? [] : spans;
  const readout = el(
    "p",
    { class: "caption", "aria-live": "off" },
    `${TOUCH ? "Tap" : "Point at"} the picture to read a pair of classes.`
  );
  const canvas = heat(
    shades,
    side,
    `${kernel} kernel between training samples sorted by class, from ${num(g.low)} (dark) to ${num(g.high)} (bright)`
  );
  const where = (part) => spans.find((s) => part < s.to) || spans[spans.length - 1];
  const read = (event) => {
    const room = canvas.getBoundingClientRect();
    const [x, y] = [(event.clientX - room.left) / room.width, (event.clientY - room.top) / room.height].map((v) =>
      Math.min(0.9999, Math.max(0, v))
    );
    const value = g.low + (shades[Math.floor(y * side) * side + Math.floor(x * side)] / 255) * (g.high - g.low);
    readout.textContent = `${name(where(y).k)} with ${name(where(x).k)}: about ${num(value, 2)}`;
  };
  for (const kind of ["pointermove", "pointerdown"]) canvas.addEventListener(kind, read);
  const bar = el("div", {
    class: "colours",
    "aria-hidden": "true",
    style: { background: `linear-gradient(to top, ${MAGMA.map((c) => `rgb(${c})`).join(",")})` },
  });
  return [
    el(
      "div",
      { class: "gramgrid" },
      el(
        "div",
        { class: "gramnames", "aria-hidden": "true" },
        named.map((s) => el("span", { style: { top: `${50 * (s.from + s.to)}%` } }, name(s.k)))
      ),
      el("div", { class: "grampic" }, canvas, spans.slice(0, -1).map(border)),
      bar,
      el("div", { class: "scale" }, el("span", {}, num(g.high, 2)), el("span", {}, num(g.low, 2)))
    ),
    readout,
    el(
      "p",
      { class: "caption" },
      `Averaged down to ${side} × ${side}. The colours span the 1st to the 99th percentile; lines part the classes` +
        (many ? `, which are too many (${spans.length}) to be named.` : ".")
    ),
  ];
}
