// The first screen, how faithful the stand-ins are, and what the kernels look like.

const COLUMNS = [
  { key: "tau", head: "τ_K", words: "Kendall’s rank correlation between the network’s and the surrogate’s probability of the true class, over the test samples. 1: both rank all samples alike; 0: they have nothing to do with each other. The bar is a bootstrap interval." },
  { key: "tad", head: "TAD", words: "Test accuracy difference: the surrogate’s accuracy less the network’s. 0 is best." },
  { key: "pearson", head: "Pearson", words: "Linear correlation of the same two probabilities. Shown for contrast: it is high as soon as both are sure of most samples." },
  { key: "r2", head: "R²", words: "Part of the variance of the network’s log-odds that the best increasing map of the surrogate’s log-odds explains." },
  { key: "accuracy", head: "Accuracy", words: "Test accuracy of the surrogate." },
  { key: "gradient", head: "Certificate", words: "Norm of the gradient at the surrogate’s answer relative to that at the start. Near 0 means that the fit is finished." },
  { key: "seconds", head: "Time", words: "Time for this kernel and its surrogate." },
];

const section = (id, title, lead, ...children) =>
  el("section", { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title), lead && el("p", { class: "lead" }, lead), children);

const card = (title, value, note, attributes) =>
  el(attributes?.onclick ? "button" : "div", { class: "card figure", type: attributes?.onclick ? "button" : null, ...attributes },
    el("span", { class: "what" }, title), el("span", { class: "big" }, value), el("span", { class: "note" }, note));

function interval(f, key, digits = 2) {
  const pair = f.intervals[key];
  return pair ? `${num(pair[0], digits)} to ${num(pair[1], digits)}` : "";
}

const thing = { pictures: "images", texts: "texts", rows: "rows", nothing: "samples" }[LOOK.kind];

function hero() {
  const f = VIEWS[best].faithful;
  const wrongHere = SAID.reduce((sum, k, at) => sum + (k !== TRUTH[at]), 0);
  const level = f.level ? `${Math.round(100 * f.level)}% interval ` : "";
  return el("section", { id: "overview", "aria-labelledby": "title" },
    el("p", { class: "kicker" }, "Why did the network say that?"),
    el("h1", { id: "title" }, ABOUT.model, el("span", { class: "on" }, " on "), ABOUT.data),
    el("p", { class: "intro" },
      `This page traces decisions of a trained network back to the training ${thing} behind them. A kernel machine, the `,
      el("em", {}, "surrogate"), ", stands in for the network: its answer is a sum over training samples, so each one’s part in a decision can be read off. ",
      "First it is measured how well the stand-in follows the network; then every decision can be looked into."),
    el("div", { class: "cards" },
      card("Network’s test accuracy", percent(f.network_accuracy), `on ${plural(N.counts.test, "test sample")}`),
      card("Most faithful kernel", VIEWS[best].name, `τ_K ${num(f.tau)}${f.intervals.tau ? `, ${level}${interval(f, "tau")}` : ""}`,
        { id: "best", title: VIEWS[best].title }),
      card("Misclassified", count(N.wrong), wrongHere ? `look into ${wrongHere === N.wrong ? "them" : `${count(wrongHere)} of them`} ↓` : "none of them explained below",
        wrongHere ? { onclick: () => { explore({ filter: "wrong" }); }, id: "to-wrong" } : {}),
      card("Training samples", count(N.counts.train), plural(CLASSES.length, "class", "classes")),
      card("Explained one by one", count(SHOWN.length), `of ${plural(N.counts.test, "test sample")} ↓`, { onclick: () => explore({}) })),
    kernels());
}

// The table of kernels. τ comes with a small picture of its interval, all on one axis.
function kernels() {
  const taus = VIEWS.flatMap((v) => [v.faithful.tau, ...(v.faithful.intervals.tau || [])]).filter((v) => !missing(v));
  const [low, high] = [Math.min(0, ...taus), Math.max(1, ...taus)];
  const scale = linear(low, high, 0, 100);
  const bar = (f) => !missing(f.tau) && el("span", { class: "span", "aria-hidden": "true" },
    f.intervals.tau && el("span", { class: "reach", style: { left: `${scale(f.intervals.tau[0])}%`, width: `${scale(f.intervals.tau[1]) - scale(f.intervals.tau[0])}%` } }),
    el("span", { class: "mark", style: { left: `${scale(f.tau)}%` } }));
  const two = (f, key, show) => [show(f[key]), f.intervals[key] && el("small", {}, `${show(f.intervals[key][0])} to ${show(f.intervals[key][1])}`)];
  const points = (v) => (missing(v) ? "–" : `${v > 0 ? "+" : v < 0 ? "−" : ""}${Math.abs(100 * v).toFixed(1)} pp`);
  const rows = VIEWS.map((v, k) => {
    const f = v.faithful;
    const button = el("button", { type: "button", class: "kernel", "data-view": k, onclick: () => change({ view: k }) },
      el("strong", {}, v.name), el("span", {}, v.title));
    return el("tr", { "data-view": k },
      el("th", { scope: "row" }, button, k === best && VIEWS.length > 1 && el("span", { class: "tag best" }, "best")),
      el("td", { class: "tau", "data-value": f.tau }, el("span", { class: "number" }, num(f.tau)), bar(f), el("small", {}, interval(f, "tau"))),
      el("td", {}, two(f, "tad", points)), el("td", {}, two(f, "pearson", (x) => num(x, 3))), el("td", {}, two(f, "r2", (x) => num(x, 3))),
      el("td", {}, percent(f.accuracy)),
      el("td", { title: `${v.fit.method}, ${v.fit.penalty} penalty, reg ${num(v.fit.reg)}, ${plural(v.fit.steps, "step")}` }, num(v.fit.gradient, 2)),
      el("td", {}, seconds(v.fit.seconds)));
  });
  watch(["view"], () => rows.forEach((r, k) => {
    r.classList.toggle("chosen", k === state.view);
    r.querySelector("button").setAttribute("aria-pressed", String(k === state.view));
  }));
  const level = VIEWS[0].faithful.level;
  return el("div", { class: "card" },
    el("h2", { class: "small" }, VIEWS.length > 1 ? "The kernels, and how well each stands in for the network" : "How well the kernel stands in for the network"),
    el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table of kernels" }, el("table", { class: "kernels" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Kernel"),
        COLUMNS.map((c) => el("th", { scope: "col", title: c.words }, c.head)))),
      el("tbody", {}, rows))),
    el("details", { class: "legend" }, el("summary", {}, "What the columns mean"),
      el("dl", {}, COLUMNS.map((c) => [el("dt", {}, c.head), el("dd", {}, c.words)])),
      level && el("p", {}, `Small print under a number: the interval that holds ${Math.round(100 * level)}% of bootstrap resamples of the test samples.`)));
}

// ---- how faithful ---------------------------------------------------------------------------------------------------

function faithful() {
  const room = el("div", { class: "chart", id: "scatter" });
  const tip = el("div", { class: "tip", hidden: true });
  const said = el("p", { class: "caption" });
  const index = array(N.scatter.index);
  const right = array(N.scatter.right);
  const network = array(N.scatter.network);
  const hover = (p, x, y) => {
    tip.hidden = !p;
    if (!p || tip.dataset.at === String(p.at)) return;
    tip.dataset.at = p.at;
    const words = `${name(TRUTH[p.at])}: network ${percent(1 / (1 + Math.exp(-p.y)))}, surrogate ${percent(1 / (1 + Math.exp(-p.x)))}`;
    tip.replaceChildren(...[PICTURES && picture("test", p.at), el("span", {}, el("strong", {}, `#${SHOWN[p.at]} `), words)].filter(Boolean));
    tip.style.left = `${Math.min(x + 14, room.clientWidth - tip.offsetWidth - 4)}px`;
    tip.style.top = `${y + 14}px`;
  };
  const draw = () => {
    const view = VIEWS[state.view];
    const x = array(view.scatter);
    const points = Array.from(index, (i, k) => ({ x: x[k], y: network[k], right: right[k], at: PLACE.get(i) }));
    tip.hidden = true;
    room.replaceChildren(scatterChart(room.clientWidth || 560, points, view.line.map(array), state.at, {
      open: (at) => explore({ at }), hover,
      title: `Network’s against ${view.name} surrogate’s probability of the true class, ${points.length} test samples. Kendall’s tau ${num(view.faithful.tau)}.` }), tip);
    const drawn = index.length < N.counts.test
      ? `${count(index.length)} of ${count(N.counts.test)} test samples: the ${count(SHOWN.length)} explained below, the others at random. ` : "";
    said.textContent = `${drawn}Each mark is a test sample; strong ones open below on a click. On the line the surrogate says just what the network says, up to an increasing map. Both axes are in log-odds, so that 99% and 99.9% are far apart.`;
  };
  watch(["view", "at"], draw);
  sized(room, draw);
  return section("faithful", "Can the stand-in be trusted?",
    "Where the marks follow the line, the surrogate orders decisions as the network does, and its explanations are of this network. Marks far off are decisions that it does not explain.",
    el("div", { class: "two" },
      el("div", { class: "card" }, el("h3", {}, "Confidence in the true class"),
        el("p", { class: "key" }, el("span", { class: "swatch dot" }), "network right ", el("span", { class: "swatch cross" }), "network wrong ", el("span", { class: "swatch line" }), "best increasing map"),
        room, said),
      confusion()));
}

function confusion() {
  const room = el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Confusion matrix" });
  const classes = N.confusion.classes;
  const part = classes.length < CLASSES.length;
  const who = choice("Whose decisions", [{ key: "network", label: "Network" }, { key: "surrogate", label: "Surrogate" }], (key) => change({ who: key }));
  const long = Math.max(...classes.map((k) => name(k).length)) > 3 || classes.length > 12;
  const draw = () => {
    who.press(state.who);
    const counts = array(state.who === "network" ? N.confusion.network : VIEWS[state.view].confusion);
    const k = classes.length;
    const rows = classes.map((truth, i) => {
      const numbers = counts.subarray(i * (k + 1), (i + 1) * (k + 1));
      const all = Math.max(1, numbers.reduce((a, b) => a + b, 0));
      const cell = (said, j) => {
        const value = numbers[j];
        const kind = said === truth ? "hit" : value ? "miss" : "none";
        const words = `${count(value)} of true class ${name(truth)} taken for ${said === null ? "a class not shown" : name(said)}`;
        const style = { "--part": `${Math.round(100 * (value ? 0.12 + 0.88 * Math.sqrt(value / all) : 0))}%` };
        const open = value && said !== null
          ? el("button", { type: "button", title: words, "aria-label": words, onclick: () => explore({ filter: "all", truth, said: state.who === "network" ? said : null, surrogate: state.who === "network" ? null : said }) }, count(value))
          : el("span", { title: words }, value ? count(value) : "·");
        return el("td", { class: kind, style }, open);
      };
      return el("tr", {}, el("th", { scope: "row", title: name(truth) }, el("span", {}, name(truth))), classes.map(cell), part && cell(null, k));
    });
    const head = classes.map((c) => el("th", { scope: "col", title: name(c) }, el("span", {}, name(c))));
    room.replaceChildren(el("table", { class: `confusion ${long ? "long" : ""}` },
      el("thead", {}, el("tr", {}, el("th", { class: "corner" }, "true ↓ said →"), head, part && el("th", { scope: "col" }, el("span", {}, "other")))),
      el("tbody", {}, rows)));
  };
  watch(["view", "who"], draw);
  return el("div", { class: "card" }, el("div", { class: "row" }, el("h3", {}, "Who is taken for whom"), who), room,
    el("p", { class: "caption" }, part
      ? `The ${classes.length} of ${CLASSES.length} classes that the network confuses most; “other” are all not shown. `
      : "", "Counts over all test samples. A click on a number shows those of them that are explained below."));
}

// ---- the kernel itself ----------------------------------------------------------------------------------------------

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
    const lines = VIEWS.map((v, k) => ({ name: v.name, place: array(v.spectrum.place), value: array(v.spectrum.value), chosen: k === state.view }));
    const s = VIEWS[state.view].spectrum;
    const first = array(s.value)[0];
    spectrum.replaceChildren(s.count
      ? spectrumChart(spectrum.clientWidth || 480, lines, CLASSES.length, `Eigenvalues of the ${VIEWS[state.view].name} kernel matrix over the largest, both axes logarithmic`)
      : el("p", { class: "empty" }, "No eigenvalues were computed for this kernel."));
    note.textContent = `${plural(s.count, "eigenvalue")} of ${VIEWS[state.view].name} over the largest, ${num(first)}` +
      `${VIEWS.length > 1 ? "; the other kernels in gray" : ""}. ${s.positive < s.count ? `${count(s.count - s.positive)} at or below zero (rounding) cannot be drawn. ` : ""}` +
      "A fast fall means that few directions carry the decisions.";
  };
  watch(["view"], () => { drawGram(); drawSpectrum(); });
  sized(spectrum, drawSpectrum);
  return section("kernel", "What the kernel sees",
    "A kernel says how alike two samples are to the network. Bright squares on the diagonal are classes that hang together; bright patches off it are classes that the network finds alike.",
    el("div", { class: "two" }, el("div", { class: "card" }, title, gram), el("div", { class: "card" }, el("h3", {}, "Spectrum"), spectrum, note)));
}

function gramPicture(g, kernel) {
  const side = g.shades.shape[0];
  const shades = array(g.shades);
  const spans = g.ends.map((end, k) => ({ k, from: k ? g.ends[k - 1] : 0, to: end })).filter((s) => s.to > s.from);
  const many = spans.length > 24;
  const border = (s) => [el("i", { class: "h", style: { top: `${100 * s.to}%` } }), el("i", { class: "v", style: { left: `${100 * s.to}%` } })];
  const named = many ? [] : spans;
  const readout = el("p", { class: "caption", "aria-live": "off" }, "Point at the picture to read a pair of classes.");
  const canvas = heat(shades, side, `${kernel} kernel between training samples sorted by class, from ${num(g.low)} (dark) to ${num(g.high)} (bright)`);
  const where = (part) => spans.find((s) => part < s.to) || spans[spans.length - 1];
  canvas.addEventListener("pointermove", (event) => {
    const room = canvas.getBoundingClientRect();
    const [x, y] = [(event.clientX - room.left) / room.width, (event.clientY - room.top) / room.height].map((v) => Math.min(0.9999, Math.max(0, v)));
    const value = g.low + (shades[Math.floor(y * side) * side + Math.floor(x * side)] / 255) * (g.high - g.low);
    readout.textContent = `${name(where(y).k)} with ${name(where(x).k)}: about ${num(value, 2)}`;
  });
  const bar = el("div", { class: "colours", "aria-hidden": "true", style: { background: `linear-gradient(to top, ${MAGMA.map((c) => `rgb(${c})`).join(",")})` } });
  return [
    el("div", { class: "gramgrid" },
      el("div", { class: "gramnames", "aria-hidden": "true" }, named.map((s) => el("span", { style: { top: `${50 * (s.from + s.to)}%` } }, name(s.k)))),
      el("div", { class: "grampic" }, canvas, spans.slice(0, -1).map(border)),
      bar,
      el("div", { class: "scale" }, el("span", {}, num(g.high, 2)), el("span", {}, num(g.low, 2)))),
    readout,
    el("p", { class: "caption" }, `Averaged down to ${side} × ${side}. The colours span the 1st to the 99th percentile; lines part the classes${many ? `, which are too many (${spans.length}) to be named` : ""}.`)];
}

// ---- foot -----------------------------------------------------------------------------------------------------------

const WORDS = [
  ["Kernel", "A number for each pair of samples: how alike they are to the network. Tangent kernels compare the gradients of the network’s outputs with respect to its weights; the conjugate kernel compares its last hidden layer."],
  ["Surrogate", "A kernel generalised linear model, softmax(W κ(x, X) + b), fitted on the training set to stand in for the network."],
  ["Attribution", "A(x, xᵢ) = W_ci κ(x, xᵢ) + b_c / N: the part of training sample i in the surrogate’s logit of class c. Over all N training samples these add up to the logit."],
  ["Helpful, harmful", "The training samples that raise, and those that lower, the chosen logit most."],
  ["Log-odds", "log p / (1 − p) of the probability p of the true class."],
  ["Least faithful", "Ordered by how far the network’s log-odds lie from the increasing map of the surrogate’s."],
];

function foot() {
  const facts = Object.entries(ABOUT.facts).filter(([, v]) => v !== null && typeof v !== "object");
  const deep = Object.entries(ABOUT.facts).filter(([, v]) => v !== null && typeof v === "object");
  const show = (v) => (typeof v === "number" ? (Number.isInteger(v) ? count(v) : num(v, 4)) : typeof v === "boolean" ? (v ? "yes" : "no") : String(v));
  const paper = "https://arxiv.org/abs/2305.14585";
  by("foot").append(
    el("div", { class: "columns" },
      el("div", {}, el("h2", { class: "small" }, "How it was computed"),
        el("dl", { class: "facts" }, facts.map(([k, v]) => [el("dt", {}, k.replaceAll("_", " ")), el("dd", {}, show(v))]),
          deep.map(([k, v]) => [el("dt", {}, k.replaceAll("_", " ")), el("dd", {}, (Array.isArray(v) ? v.map((x) => (typeof x === "object" ? JSON.stringify(x) : show(x))) : Object.entries(v).map(([a, b]) => `${a}: ${typeof b === "object" ? JSON.stringify(b) : show(b)}`)).join(", "))])),
        el("h2", { class: "small" }, "What was kept, and what was left out"),
        el("ul", { id: "notes" }, ABOUT.notes.map((n) => el("li", {}, n)))),
      el("div", {}, el("h2", { class: "small" }, "What the words mean"),
        el("dl", {}, WORDS.map(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])))),
    el("p", { class: "paper" }, "Method: A. Engel, Z. Wang, N. Frank, I. Dumitriu, S. Choudhury, A. Sarwate, T. Chiang, ",
      el("a", { href: paper, rel: "noreferrer" }, "Faithful and efficient explanations for neural networks via neural tangent kernel surrogate models"), ", ICLR 2024, arXiv:2305.14585. ",
      `Made by tangency ${ABOUT.version}. This file is complete: it loads nothing.`));
}
