// Choosing a decision: search, filters, order, and the strip of samples.

const WORST = 0.1; // the part of the samples that "least faithful" shows

const offBy = (at) => Math.abs(array(VIEWS[state.view].off)[at]);

// Each filter is a test of a sample for the chosen kernel; `known` leaves out what the data do not say.
const FILTERS = [
  { key: "all", label: "All", test: () => true },
  { key: "wrong", label: "Misclassified", title: "the network is wrong", test: (at) => SAID[at] !== TRUTH[at] },
  {
    key: "split",
    label: "Disagreements",
    title: "network and surrogate give different answers",
    test: (at) => SAID[at] !== array(VIEWS[state.view].said)[at],
  },
  {
    key: "far",
    label: "Least faithful",
    title: "the tenth whose log-odds the surrogate misses most",
    test: (at) => worst().has(at),
  },
  {
    key: "poisoned",
    label: "Poisoned",
    title: "known to be poisoned",
    known: () => POISONED,
    test: (at) => POISONED[at],
  },
  {
    key: "flagged",
    label: "Flagged",
    title: "most of its neighbours are poisoned",
    known: () => VIEWS.some((v) => v.flagged),
    test: (at) => VIEWS[state.view].flagged && array(VIEWS[state.view].flagged)[at],
  },
];

const confidence = (at) => probability(at, state.view, SAID[at], "network");

const ORDERS = {
  given: { label: "as given", compare: () => 0 },
  index: { label: "number", compare: (a, b) => SHOWN[a] - SHOWN[b] },
  far: { label: "least faithful first", compare: (a, b) => offBy(b) - offBy(a) },
  unsure: { label: "network least sure first", compare: (a, b) => confidence(a) - confidence(b) },
  sure: { label: "network surest first", compare: (a, b) => confidence(b) - confidence(a) },
  truth: { label: "true class", compare: (a, b) => TRUTH[a] - TRUTH[b] },
};

const ALL = Array.from(SHOWN, (_, at) => at);
let worstOf = { view: -1, places: new Set() };

function worst() {
  if (worstOf.view !== state.view) {
    const many = Math.max(Math.min(10, SHOWN.length), Math.round(WORST * SHOWN.length));
    worstOf = { view: state.view, places: new Set([...ALL].sort((a, b) => offBy(b) - offBy(a)).slice(0, many)) };
  }
  return worstOf.places;
}

// Every word must be found in the number (#12 or 12), the true class, the network's answer or the text.
function matches(at, words) {
  return words.every(
    (word) =>
      word === String(SHOWN[at]) ||
      word === `#${SHOWN[at]}` ||
      (!word.startsWith("#") &&
        (name(TRUTH[at]).toLowerCase().includes(word) ||
          name(SAID[at]).toLowerCase().includes(word) ||
          searchable(at).includes(word)))
  );
}

// The samples that pass everything chosen, in the chosen order.
function listed() {
  const filter = FILTERS.find((f) => f.key === state.filter);
  const words = state.query.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const stand = array(VIEWS[state.view].said);
  const found = ALL.filter(
    (at) =>
      filter.test(at) &&
      (state.truth === null || TRUTH[at] === state.truth) &&
      (state.said === null || SAID[at] === state.said) &&
      (state.surrogate === null || stand[at] === state.surrogate) &&
      matches(at, words)
  );
  const order = state.filter === "far" && state.order === "given" ? "far" : state.order;
  return order === "given" ? found : found.sort(ORDERS[order].compare);
}

let current = []; // what is listed now
const clear = { filter: "all", truth: null, said: null, surrogate: null, query: "" };

// Shows a sample, or a choice of samples, and brings the explorer into view. What hides the sample is cleared.
function explore(next) {
  const fresh = "at" in next ? {} : { ...clear };
  change({ ...fresh, ...next });
  if ("at" in next && !current.includes(next.at)) change({ ...clear, at: next.at });
  const instead = matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth";
  by("why").scrollIntoView({ behavior: instead, block: "start" });
}

function step(forward) {
  if (!current.length) return;
  const place = current.indexOf(state.at);
  const next = place < 0 ? 0 : Math.min(current.length - 1, Math.max(0, place + forward));
  change({ at: current[next] });
}

// ---- the strip ------------------------------------------------------------------------------------------------------

function entry(at) {
  const wrong = SAID[at] !== TRUTH[at];
  const poisoned = POISONED && POISONED[at];
  const answer = wrong ? `, network says ${name(SAID[at])}` : "";
  const words = `#${SHOWN[at]}: ${name(TRUTH[at])}${answer}${poisoned ? ", poisoned" : ""}`;
  const inside = PICTURES
    ? picture("test", at)
    : [
        el("span", { class: "index" }, `#${SHOWN[at]}`),
        el("span", { class: "class" }, name(TRUTH[at]), wrong && el("em", {}, ` → ${name(SAID[at])}`)),
        LOOK.kind === "texts" && el("span", { class: "snippet" }, text("test", at).slice(0, 120)),
        LOOK.kind === "rows" &&
          el("span", { class: "snippet" }, Array.from(cells("test", at).subarray(0, 6), (v) => num(v, 3)).join("  ")),
      ];
  return el(
    "button",
    {
      type: "button",
      class: `entry ${wrong ? "wrong" : ""} ${poisoned ? "poisoned" : ""}`,
      title: words,
      "aria-label": PICTURES ? words : null,
      "data-sample": SHOWN[at],
      tabindex: -1,
      onclick: () => change({ at }),
    },
    inside
  );
}

const nothing = () =>
  el(
    "div",
    { class: "empty" },
    el("p", {}, "No explained sample fits."),
    el("button", { type: "button", onclick: () => change({ ...clear }) }, "Show all")
  );

// ---- the whole ------------------------------------------------------------------------------------------------------

function selector(label, key, words) {
  const present = [
    ...new Set(key === "truth" ? TRUTH : key === "said" ? SAID : VIEWS.flatMap((v) => [...array(v.said)])),
  ].sort((a, b) => a - b);
  const node = el(
    "select",
    { onchange: () => change({ [key]: node.value === "" ? null : Number(node.value) }) },
    el("option", { value: "" }, "any"),
    present.map((k) => el("option", { value: k }, name(k)))
  );
  node.show = () => (node.value = state[key] === null ? "" : state[key]);
  return { node, whole: el("label", { title: words }, el("span", {}, label), node) };
}

function controls() {
  const search = el("input", {
    type: "search",
    id: "search",
    placeholder: LOOK.kind === "texts" ? "#12, class or words" : "#12 or class",
    autocomplete: "off",
    spellcheck: "false",
    "aria-label": "Search by number, class or text",
    oninput: () => change({ query: search.value }),
  });
  const known = FILTERS.filter((f) => !f.known || f.known());
  const tallies = known.map(() => el("span", { class: "tally" }));
  const chips = choice(
    "Which samples",
    known.map((f, k) => ({ key: f.key, title: f.title, label: [f.label, " ", tallies[k]] })),
    (key) => change({ filter: key }),
    { kind: "chips" }
  );
  const selects = [
    selector("True class", "truth", "the class that the data give"),
    selector("Network said", "said", "the network’s answer"),
    selector("Surrogate said", "surrogate", "the answer of the chosen kernel’s surrogate"),
  ];
  const order = el(
    "select",
    { onchange: () => change({ order: order.value }) },
    Object.entries(ORDERS).map(([key, o]) => el("option", { value: key }, o.label))
  );
  const show = () => {
    chips.press(state.filter);
    known.forEach((f, k) => (tallies[k].textContent = count(ALL.filter((at) => f.test(at)).length)));
    if (search.value !== state.query) search.value = state.query;
    selects.forEach((s) => s.node.show());
    order.value = state.order;
  };
  watch(["view", "filter", "query", "truth", "said", "surrogate", "order"], show);
  return [
    search,
    chips,
    el(
      "div",
      { class: "selects" },
      selects.map((s) => s.whole),
      el("label", {}, el("span", {}, "Order"), order)
    ),
  ];
}

// How to get about, in words for what is at hand.
function hints() {
  const keys = (...names) => names.map((k) => el("kbd", {}, k));
  if (TOUCH)
    return el(
      "p",
      { class: "hints", id: "hints" },
      "Swipe a decision left or right for the next sample, tap a training sample to see it by itself, and drag " +
        "tables sideways."
    );
  const many = Math.min(9, VIEWS.length);
  return el(
    "p",
    { class: "hints", id: "hints" },
    keys("←", "→"),
    " or ",
    keys("k", "j"),
    " sample ",
    many > 1 && [keys("1"), "–", keys(String(many)), " kernel "],
    keys("/"),
    " search ",
    keys("Esc"),
    " leave"
  );
}

function explorer() {
  const samples = strip("strip", "Test samples", {
    found: () => current,
    at: () => state.at,
    entry,
    nothing,
  });
  const where = el("span", { class: "where", "aria-live": "polite" });
  const detail = el("div", { class: "detail", id: "detail" });
  const buttons = [
    el("button", { type: "button", id: "previous", onclick: () => step(-1) }, "← Previous"),
    el("button", { type: "button", id: "next", onclick: () => step(1) }, "Next →"),
  ];
  const place = () => {
    const k = current.indexOf(state.at);
    where.textContent = current.length ? `${k < 0 ? "–" : count(k + 1)} of ${count(current.length)}` : "none";
    buttons[0].disabled = k <= 0;
    buttons[1].disabled = !current.length || k === current.length - 1;
  };
  const choosing = ["view", "filter", "query", "truth", "said", "surrogate", "order"];
  watch(choosing, (before) => {
    current = listed();
    // The chosen sample stays with a new kernel; a new choice of samples begins with its first.
    const moved = before && before.view === state.view;
    if (moved && current.length && !current.includes(state.at)) change({ at: current[0] });
    samples.renew();
    place();
  });
  watch(["at"], () => {
    samples.mark();
    place();
  });
  watch(["at", "view", "output", "range"], () => detail.replaceChildren(...sample(state.at)));
  swiped(detail, step);
  return section(
    "why",
    "Why did the network say that?",
    `Choose one of ${plural(SHOWN.length, "test sample")}. Beside it: what the network and its stand-in ` +
      `said, and the training ${thing} that the answer rests on.`,
    hints(),
    el(
      "div",
      { class: "explorer" },
      el(
        "div",
        { class: "chooser card" },
        controls(),
        el("div", { class: "row walk" }, buttons[0], where, buttons[1]),
        samples
      ),
      detail
    )
  );
}

KEYS.push({
  room: "why",
  acts: {
    ArrowRight: () => step(1),
    ArrowLeft: () => step(-1),
    j: () => step(1),
    k: () => step(-1),
    "/": () => by("search").focus(),
    ...Object.fromEntries(VIEWS.slice(0, 9).map((_, view) => [view + 1, () => change({ view })])),
  },
});
