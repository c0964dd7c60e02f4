// The first screen: what this is, the key figures, and the kernels.

const tau = () => ["τ", el("sub", {}, "K")];

const COLUMNS = [
  {
    key: "tau",
    head: tau,
    words:
      "Kendall’s rank correlation between the network’s and the surrogate’s probability of the true class, " +
      "over the test samples. 1: both rank all samples alike; 0: they have nothing to do with each other. " +
      "The bar is a bootstrap interval; the word under it says how well the surrogate follows the network.",
  },
  {
    key: "tad",
    head: "TAD",
    words: "Test accuracy difference: the surrogate’s accuracy less the network’s. 0 is best.",
  },
  {
    key: "pearson",
    head: "Pearson",
    words:
      "Linear correlation of the same two probabilities. Shown for contrast: it is high as soon as both are " +
      "sure of most samples.",
  },
  {
    key: "r2",
    head: "R²",
    words:
      "Part of the variance of the network’s log-odds that the best increasing map of the surrogate’s " +
      "log-odds explains.",
  },
  {
    key: "accuracy",
    head: "Accuracy",
    words:
      "Test accuracy of the surrogate; under it the balanced accuracy, in which each class counts alike, however many " +
      "samples it has.",
  },
  {
    key: "gradient",
    head: "Certificate",
    words:
      "Norm of the gradient at the surrogate’s answer relative to that at the start. Near 0 means that the " +
      "fit is finished.",
  },
  { key: "seconds", head: "Time", words: "Time for this kernel and its surrogate." },
];

const words = (head) => (typeof head === "function" ? head() : head);

function interval(f, key, digits = 2) {
  const pair = f.intervals[key];
  return pair ? `${num(pair[0], digits)} to ${num(pair[1], digits)}` : "";
}

function hero() {
  const f = VIEWS[best].faithful;
  const wrongHere = SAID.reduce((sum, k, at) => sum + (k !== TRUTH[at]), 0);
  const level = f.level ? `${Math.round(100 * f.level)}% interval ` : "";
  return el(
    "section",
    { id: "overview", "aria-labelledby": "title" },
    el("p", { class: "kicker" }, "Decisions, traced to the training data"),
    el("h1", { id: "title" }, ABOUT.model, el("span", { class: "on" }, " on "), ABOUT.data),
    el(
      "p",
      { class: "intro" },
      `This page traces decisions of a trained network back to the training ${thing} behind them. A kernel ` +
        "machine, the ",
      el("em", {}, "surrogate"),
      ", stands in for the network: its answer is a sum over training samples, so each one’s part in a " +
        "decision can be read off. ",
      "First it is measured how well the stand-in follows the network; then every decision can be looked into."
    ),
    N.warning && el("p", { class: "intro", id: "warning", role: "alert" }, el("strong", {}, N.warning)),
    el(
      "div",
      { class: "cards" },
      card(
        "Network’s test accuracy",
        percent(N.accuracy.network),
        `balanced over classes ${percent(N.accuracy.balanced)}; always saying “${N.accuracy["most frequent"]}”: ` +
          percent(N.accuracy.majority),
        { id: "accuracy" }
      ),
      card(
        N.warning ? "Least unfaithful kernel" : "Most faithful kernel",
        VIEWS[best].name,
        [tau(), ` ${num(f.tau)}`, f.intervals.tau && `, ${level}${interval(f, "tau")}`],
        { id: "best", title: VIEWS[best].title }
      ),
      card(
        "Misclassified",
        count(N.wrong),
        wrongHere
          ? `look into ${wrongHere === N.wrong ? "them" : `${count(wrongHere)} of them`} ↓`
          : "none of them explained below",
        wrongHere ? { onclick: () => explore({ filter: "wrong" }), id: "to-wrong" } : {}
      ),
      card("Training samples", count(N.counts.train), plural(CLASSES.length, "class", "classes")),
      card("Explained one by one", count(SHOWN.length), `of ${plural(N.counts.test, "test sample")} ↓`, {
        onclick: () => explore({}),
      })
    ),
    trust(),
    kernels()
  );
}

// The table of kernels. τ comes with a small picture of its interval, all on one axis.
function kernels() {
  const taus = VIEWS.flatMap((v) => [v.faithful.tau, ...(v.faithful.intervals.tau || [])]).filter((v) => !missing(v));
  const [low, high] = [Math.min(0, ...taus), Math.max(1, ...taus)];
  const scale = linear(low, high, 0, 100);
  const bar = (f) =>
    !missing(f.tau) &&
    el(
      "span",
      { class: "span", "aria-hidden": "true" },
      f.intervals.tau &&
        el("span", {
          class: "reach",
          style: {
            left: `${scale(f.intervals.tau[0])}%`,
            width: `${scale(f.intervals.tau[1]) - scale(f.intervals.tau[0])}%`,
          },
        }),
      el("span", { class: "mark", style: { left: `${scale(f.tau)}%` } })
    );
  const two = (f, key, show) => [
    show(f[key]),
    f.intervals[key] && el("small", {}, `${show(f.intervals[key][0])} to ${show(f.intervals[key][1])}`),
  ];
  const points = (v) => (missing(v) ? "–" : `${v > 0 ? "+" : v < 0 ? "−" : ""}${Math.abs(100 * v).toFixed(1)} pp`);
  const rows = VIEWS.map((v, k) => {
    const f = v.faithful;
    const button = el(
      "button",
      { type: "button", class: "kernel", "data-view": k, onclick: () => change({ view: k }) },
      el("strong", {}, v.name),
      k === best && !N.warning && VIEWS.length > 1 && el("b", { class: "tag best" }, "best"),
      el("span", {}, v.title)
    );
    return el(
      "tr",
      { "data-view": k },
      el("th", { scope: "row" }, button),
      el(
        "td",
        { class: "tau", "data-value": f.tau },
        el("span", { class: "number" }, num(f.tau)),
        bar(f),
        el("small", {}, interval(f, "tau")),
        word(v)
      ),
      el("td", {}, two(f, "tad", points)),
      el(
        "td",
        {},
        two(f, "pearson", (x) => num(x, 3))
      ),
      el(
        "td",
        {},
        two(f, "r2", (x) => num(x, 3))
      ),
      el(
        "td",
        {},
        percent(f.accuracy),
        !missing(f.balanced_accuracy) && el("small", {}, `balanced ${percent(f.balanced_accuracy)}`)
      ),
      el(
        "td",
        { title: `${v.fit.solver}, ${v.fit.penalty} penalty, reg ${num(v.fit.reg)}, ${plural(v.fit.steps, "step")}` },
        num(v.fit.gradient, 2)
      ),
      el("td", {}, seconds(v.fit.seconds))
    );
  });
  watch(["view"], () =>
    rows.forEach((r, k) => {
      r.classList.toggle("chosen", k === state.view);
      r.querySelector("button").setAttribute("aria-pressed", String(k === state.view));
    })
  );
  const level = VIEWS[0].faithful.level;
  return el(
    "div",
    { class: "card" },
    el(
      "h2",
      { class: "small" },
      VIEWS.length > 1
        ? "The kernels, and how well each stands in for the network"
        : "How well the kernel stands in for the network"
    ),
    el(
      "div",
      { class: "wide", tabindex: 0, role: "region", "aria-label": "Table of kernels" },
      el(
        "table",
        { class: "kernels" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", { scope: "col" }, "Kernel"),
            COLUMNS.map((c) => el("th", { scope: "col", title: c.words }, words(c.head)))
          )
        ),
        el("tbody", {}, rows)
      )
    ),
    el(
      "details",
      { class: "legend" },
      el("summary", {}, "What the columns mean"),
      el(
        "dl",
        {},
        COLUMNS.map((c) => [el("dt", {}, words(c.head)), el("dd", {}, c.words)])
      ),
      level &&
        el(
          "p",
          {},
          `Small print under a number: the interval that holds ${Math.round(100 * level)}% of bootstrap ` +
            "resamples of the test samples."
        )
    )
  );
}
