// The suspects one after another: which are listed, which is shown, and what is decided.

// Those more likely wrong than right, where there are any; the list holds the next ones too.
const LIKELY = WRONG.filter((p) => p > 0.5).length;
const STAGES = [
  { key: "undecided", label: "Undecided", test: (at) => !decided.has(SUSPECTS[at]) },
  { key: "any", label: "All", test: () => true },
  ...["keep", "fix", "drop"]
    .filter((action) => action !== "fix" || !A.real)
    .map((action) => ({
      key: action,
      label: { keep: "Kept", fix: "Fixed", drop: "Dropped" }[action],
      test: (at) => decided.get(SUSPECTS[at])?.action === action,
    })),
];

Object.assign(state, {
  suspect: 0,
  pool: LIKELY ? "likely" : "all",
  stage: "any",
  given: null,
  suggested: null,
  sought: "",
  changes: 0,
});
const CHOOSING = ["pool", "given", "suggested", "sought"];
const clear = { pool: "all", stage: "any", given: null, suggested: null, sought: "" };

addresses.push({
  room: "suspects",
  say: () => (SUSPECTS.length ? { suspect: SUSPECTS[state.suspect] } : {}),
  read: (said) => {
    const suspect = RANK.get(Number(said.get("suspect") ?? NaN));
    return suspect === undefined ? {} : { suspect, ...(suspect >= LIKELY && { pool: "all" }) };
  },
  open: (next) => review(next),
});

// ---- which are listed -----------------------------------------------------------------------------------------------

let pool = []; // the suspects that are chosen, decided or not
let found = []; // those of them that are listed

function matches(at, words) {
  const sample = SUSPECTS[at];
  const text = LOOK.kind === "texts" ? look("train", PLACES.train.get(sample), sample, false).textContent : "";
  const all = [given(at), suggested(at), A.ids ? A.ids[sample] : "", text].join("\n").toLowerCase();
  return words.every(
    (word) => word === String(sample) || word === `#${sample}` || (!word.startsWith("#") && all.includes(word))
  );
}

function choosePool() {
  const words = state.sought.trim().toLowerCase().split(/\s+/).filter(Boolean);
  pool = Array.from(SUSPECTS, (_, at) => at).filter(
    (at) =>
      (state.pool === "all" || WRONG[at] > 0.5) &&
      (state.given === null || GIVEN[SUSPECTS[at]] === state.given) &&
      (state.suggested === null || SUGGESTED[at] === state.suggested) &&
      (!words.length || matches(at, words))
  );
}

function chooseStage() {
  found = pool.filter(STAGES.find((s) => s.key === state.stage).test);
}

// ---- going from one to the next -------------------------------------------------------------------------------------

// Shows a suspect, or a choice of suspects, and brings them into view. What hides the suspect is cleared.
function review(next) {
  change({ ...("suspect" in next ? {} : clear), ...next });
  if ("suspect" in next && !found.includes(next.suspect)) change({ ...clear, suspect: next.suspect });
  const instead = matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth";
  by("suspects").scrollIntoView({ behavior: instead, block: "start" });
}

function step(forward) {
  if (!found.length) return;
  const place = found.indexOf(state.suspect);
  // One that has just left the list: from where it was.
  const from = place < 0 ? found.findIndex((at) => at > state.suspect) - (forward > 0 ? 1 : 0) : place;
  change({ suspect: found[Math.min(found.length - 1, Math.max(0, from + forward))] });
}

// The next one after this that is not decided; from the start again after the last. Null: there is none.
function nextUndecided() {
  const open = pool.filter((at) => !decided.has(SUSPECTS[at]));
  return open.find((at) => at > state.suspect) ?? open[0] ?? null;
}

function toUndecided() {
  const next = nextUndecided();
  if (next === null) return;
  change({ suspect: next, ...(!found.includes(next) && { stage: "any" }) });
}

// Decides about the suspect that is shown, and goes on to the next, unless told to stay.
function settle(action, onwards = true) {
  const sample = SUSPECTS[state.suspect];
  decide([[sample, action === "fix" ? { action, label: Number(by("fix-to").value) } : { action }]]);
  const next = onwards ? nextUndecided() : null;
  change({ changes: state.changes + 1, suspect: next ?? state.suspect });
}

function undo() {
  const back = takeBack();
  if (!back.length) return;
  const at = RANK.get(back[back.length - 1]);
  change({ changes: state.changes + 1, ...(at !== undefined && { suspect: at }) });
  if (at !== undefined && !found.includes(at)) change({ ...clear, suspect: at });
}

// A key decides about what can be seen: else it only brings that into view.
const seen = (act) => () => {
  if (!SUSPECTS.length) return;
  if (inSight("suspect") > 120) act();
  else by("suspects").scrollIntoView();
};

KEYS.push({
  room: "suspects",
  acts: {
    ArrowRight: () => step(1),
    ArrowLeft: () => step(-1),
    j: () => step(1),
    k: () => step(-1),
    n: () => toUndecided(),
    a: seen(() => settle("keep")),
    d: seen(() => settle("drop")),
    u: seen(() => undo()),
    "/": () => by("seek")?.focus(),
    ...(!A.real && { f: seen(() => settle("fix")) }),
  },
});

function suspectHints() {
  const keys = (...names) => names.map((k) => el("kbd", {}, k));
  if (TOUCH)
    return el(
      "p",
      { class: "hints", id: "suspect-hints" },
      "Swipe left or right for the next suspect; tap a sample to see it by itself."
    );
  return el(
    "p",
    { class: "hints", id: "suspect-hints" },
    [
      [keys("a"), " keep"],
      !A.real && [keys("f"), " fix"],
      [keys("d"), " drop"],
      [keys("u"), " undo"],
      [keys("n"), " next undecided"],
      [keys("←", "→"), " or ", keys("k", "j"), " suspect"],
      [keys("/"), " search"],
    ].map((words) => words && el("span", {}, words))
  );
}

// ---- the list -------------------------------------------------------------------------------------------------------

function entry(at) {
  const sample = SUSPECTS[at];
  const place = PLACES.train.get(sample);
  const words = () => `#${sample}: ${given(at)}, rather ${suggested(at)}, ${inWords(decided.get(sample))}`;
  const mark = el("span", { class: "mark-of", "aria-hidden": "true" });
  const inside = PICTURES
    ? picture("train", place)
    : [
        el("span", { class: "index" }, `#${sample}`),
        el("span", { class: "class" }, given(at), given(at) !== suggested(at) && el("em", {}, ` → ${suggested(at)}`)),
        LOOK.kind === "texts" && el("span", { class: "snippet" }, text("train", place).slice(0, 120)),
      ];
  const node = el(
    "button",
    {
      type: "button",
      class: "entry",
      "data-sample": sample,
      tabindex: -1,
      onclick: () => change({ suspect: at }),
    },
    inside,
    mark
  );
  node.renew = () => {
    if (node.title === words()) return;
    const action = decided.get(sample)?.action ?? "";
    node.dataset.action = action;
    mark.textContent = { keep: "✓", fix: "✎", drop: "✕" }[action] ?? "";
    node.title = words();
    node.setAttribute("aria-label", words());
  };
  node.renew();
  return node;
}

const nothing = () =>
  el(
    "div",
    { class: "empty" },
    el("p", {}, pool.length && state.stage === "undecided" ? "All of these are decided." : "No suspect fits."),
    el("button", { type: "button", onclick: () => change({ ...clear }) }, "Show all")
  );

function selector(label, key, classes) {
  const node = el(
    "select",
    { id: `by-${key}`, onchange: () => change({ [key]: node.value === "" ? null : Number(node.value) }) },
    el("option", { value: "" }, "any"),
    [...new Set(classes)].sort((a, b) => a - b).map((k) => el("option", { value: k }, name(k)))
  );
  watch([key], () => (node.value = state[key] === null ? "" : state[key]));
  return el("label", {}, el("span", {}, label), node);
}

function chooser() {
  const which = choice(
    "Which suspects",
    [
      { key: "likely", label: `Likely wrong ${count(LIKELY)}`, title: "more likely wrong than right" },
      { key: "all", label: `All listed ${count(SUSPECTS.length)}` },
    ],
    (key) => change({ pool: key })
  );
  watch(["pool"], () => which.press(state.pool));
  const seek = el("input", {
    type: "search",
    id: "seek",
    placeholder: "#12, label or text",
    autocomplete: "off",
    spellcheck: "false",
    "aria-label": "Search by number, label or text",
    oninput: () => change({ sought: seek.value }),
  });
  const tallies = STAGES.map(() => el("span", { class: "tally" }));
  const stages = choice(
    "Decided or not",
    STAGES.map((s, k) => ({ key: s.key, label: [s.label, " ", tallies[k]] })),
    (key) => change({ stage: key }),
    { kind: "chips" }
  );
  watch([...CHOOSING, "stage", "changes"], () => {
    stages.press(state.stage);
    STAGES.forEach((s, k) => (tallies[k].textContent = count(pool.filter(s.test).length)));
    if (seek.value !== state.sought) seek.value = state.sought;
  });
  return [
    seek,
    LIKELY > 0 && LIKELY < SUSPECTS.length && which,
    stages,
    !A.real &&
      el(
        "div",
        { class: "selects" },
        selector(
          "Given label",
          "given",
          Array.from(SUSPECTS, (sample) => GIVEN[sample])
        ),
        selector("Suggested", "suggested", SUGGESTED)
      ),
  ];
}

function progress() {
  const words = el("strong", { id: "progress", role: "status" });
  const bar = el("i");
  watch([...CHOOSING, "changes"], () => {
    const done = pool.filter((at) => decided.has(SUSPECTS[at])).length;
    words.textContent = `${count(done)} of ${count(pool.length)} decided`;
    bar.style.width = `${(100 * done) / Math.max(1, pool.length)}%`;
    on.disabled = done === pool.length;
    back.disabled = !past.length;
  });
  const on = el("button", { type: "button", id: "next-undecided", onclick: toUndecided }, "Next undecided");
  const back = el("button", { type: "button", id: "undo", onclick: undo }, "Undo");
  return el(
    "div",
    { class: "progress" },
    el("div", { class: "row" }, words, el("span", { class: "buttons" }, back, on)),
    el("span", { class: "level", "aria-hidden": "true" }, bar)
  );
}

// ---- the whole ------------------------------------------------------------------------------------------------------

function walk() {
  const where = el("span", { class: "where" });
  const buttons = [
    el("button", { type: "button", id: "suspect-before", onclick: () => step(-1) }, "← Previous"),
    el("button", { type: "button", id: "suspect-after", onclick: () => step(1) }, "Next →"),
  ];
  watch([...CHOOSING, "stage", "changes", "suspect"], () => {
    const k = found.indexOf(state.suspect);
    where.textContent = found.length ? `${k < 0 ? "–" : count(k + 1)} of ${count(found.length)}` : "none";
    buttons[0].disabled = !found.length || k === 0;
    buttons[1].disabled = !found.length || k === found.length - 1;
  });
  return el("div", { class: "row walk" }, buttons[0], where, buttons[1]);
}

function suspects() {
  const title = A.real ? "Suspect targets" : "Suspect labels";
  const lead = S.count
    ? `${plural(S.count, what)} of ${count(A.samples)} ${S.count === 1 ? "is" : "are"} more likely wrong than right, ` +
      "by what the other samples say. Look at each, and keep, " +
      (A.real ? "or drop it." : "fix or drop it.")
    : `No ${what} is more likely wrong than right. The ones that the other samples speak against most are listed all ` +
      "the same.";
  if (!SUSPECTS.length) return section("suspects", title, "No sample is listed.");
  const samples = strip("suspect-strip", "Suspects", {
    found: () => found,
    at: () => state.suspect,
    entry,
    nothing,
  });
  const card = el("div", { class: "card decision", id: "suspect" });
  watch([...CHOOSING, "stage"], (before) => {
    choosePool();
    chooseStage();
    if (before && found.length && !found.includes(state.suspect)) change({ suspect: found[0] });
    samples.renew();
  });
  watch(["changes"], (before) => {
    if (!before) return;
    for (const at of pool) samples.made(at)?.renew();
    if (state.stage === "any") return;
    chooseStage();
    samples.renew(true);
  });
  watch(["suspect"], () => samples.mark());
  // A button that was pressed is drawn again, and keeps the focus.
  watch(["suspect", "changes"], () => {
    const focused = card.contains(document.activeElement) && document.activeElement.id;
    card.replaceChildren(...suspectCard(state.suspect));
    if (focused) by(focused)?.focus({ preventScroll: true });
  });
  swiped(card, step);
  const parts = [chooser(), progress(), walk()];
  return section(
    "suspects",
    title,
    lead,
    suspectHints(),
    el(
      "div",
      { class: "explorer" },
      el("div", { class: "chooser card" }, parts[0], parts[1], parts[2], samples),
      el("div", { class: "detail" }, card, files())
    )
  );
}
