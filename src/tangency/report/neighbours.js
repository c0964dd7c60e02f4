// The training samples behind a decision: lists of them, and each by itself.

const LISTS = [
  {
    kind: "similar",
    title: "Most similar",
    words: (_, found) => `largest kernel value${found.some(hasCosine) ? ", said as a cosine: 1 is the same" : ""}`,
    unit: "κ",
  },
  { kind: "helpful", title: "Most helpful", words: (k) => `raise the logit of ${k} most`, unit: "A" },
  { kind: "harmful", title: "Most harmful", words: (k) => `lower the logit of ${k} most`, unit: "A" },
];

function neighbourLists(at) {
  const output = row(VIEWS[state.view].outputs, at)[state.output];
  return LISTS.map(({ kind, title, words, unit }) => {
    const found = neighbours(at, state.view, kind, state.output);
    const same = found.filter((n) => n.truth === TRUTH[at]).length;
    return el(
      "section",
      { class: `neighbours ${kind}`, "data-list": kind, "aria-label": `${title} training samples` },
      el("h4", {}, title, el("span", {}, `${words(name(output), found)} · ${same} of ${found.length} of the true class`)),
      found.length === 0
        ? el("p", { class: "empty" }, "None.")
        : LOOK.kind === "rows"
          ? rowsTable(at, found, unit)
          : el(
              "ol",
              { class: LOOK.kind },
              found.map((n) => tile(at, n, unit))
            )
    );
  });
}

const hasCosine = (n) => !missing(n.cosine);

// What is said of a training sample: its attribution, or how alike it is, as a cosine where that is known.
function amount(n, unit) {
  if (unit !== "κ") return { shown: signed(n.value), words: `attribution ${num(n.value)}` };
  if (!hasCosine(n)) return { shown: `κ ${num(n.value)}`, words: `kernel value ${num(n.value)}` };
  const same = Math.abs(n.cosine - n.value) < 1e-6;
  return { shown: num(n.cosine), words: `cosine ${num(n.cosine)}${same ? "" : `, kernel value ${num(n.value)}`}` };
}

function caption(at, n, unit) {
  const strange = n.truth !== TRUTH[at];
  const { shown, words } = amount(n, unit);
  return [
    el(
      "span",
      { class: "class", title: name(n.truth) },
      strange && el("b", { title: "not of the true class" }, "≠"),
      name(n.truth)
    ),
    el("span", { class: "amount", title: words }, shown),
    el("span", { class: "index" }, `#${n.index}`),
    n.poisoned && tag("poison", "poisoned"),
  ];
}

function tile(at, n, unit) {
  const strange = n.truth !== TRUTH[at];
  const words =
    `training sample ${n.index}, class ` +
    `${name(n.truth)}${strange ? ", not the true class" : ""}${n.poisoned ? ", poisoned" : ""}, ` +
    amount(n, unit).words;
  return el(
    "li",
    {},
    el(
      "button",
      {
        type: "button",
        class: `tile ${strange ? "strange" : ""} ${n.poisoned ? "poisoned" : ""}`,
        "aria-label": words,
        "data-index": n.index,
        "data-value": n.value,
        "data-cosine": hasCosine(n) ? n.cosine : null,
        "data-class": n.truth,
        onclick: () => openTraining(n.place),
      },
      look("train", n.place, n.index, false),
      el("span", { class: "caption" }, caption(at, n, unit))
    )
  );
}

// Rows of a table are compared with the sample's own, column by column.
function rowsTable(at, found, unit) {
  const line = (n) => ({
    kind: `${n.truth !== TRUTH[at] ? "strange" : ""} ${n.poisoned ? "poisoned" : ""}`,
    head: el(
      "button",
      {
        type: "button",
        class: "tile plain",
        "data-index": n.index,
        "data-value": n.value,
        "data-cosine": hasCosine(n) ? n.cosine : null,
        "data-class": n.truth,
        onclick: () => openTraining(n.place),
      },
      el("span", { class: "caption" }, caption(at, n, unit))
    ),
    values: cells("train", n.place),
  });
  return comparedRows("Training samples", { words: "this sample", values: cells("test", at) }, found.map(line));
}

// A training sample by itself, and the decisions in which it has a part.
function openTraining(place) {
  const n = training(place);
  const inside = mentions(place, state.view);
  const link = (at, leave) =>
    el(
      "button",
      { type: "button", class: "link", onclick: leave(() => explore({ at })) },
      `#${SHOWN[at]} ${name(TRUTH[at])}`
    );
  const part = (kind, words, leave) =>
    inside[kind].length > 0 &&
    el(
      "p",
      {},
      `${words} for ${plural(inside[kind].length, "explained sample")}: `,
      inside[kind].slice(0, 12).map((at, k) => [k ? ", " : "", link(at, leave)]),
      inside[kind].length > 12 && " …"
    );
  openWindow(`Training sample #${n.index}`, `Training sample ${n.index}`, (leave) => [
    el("p", {}, "Class ", el("strong", {}, name(n.truth)), " ", n.poisoned && tag("poison", "poisoned")),
    look("train", place, n.index, true),
    el("p", { class: "caption" }, `With ${VIEWS[state.view].name}, for what the network said:`),
    part("similar", "Among the most similar", leave),
    part("helpful", "Among the most helpful", leave),
    part("harmful", "Among the most harmful", leave),
  ]);
}
