// One decision: the sample, what was said about it, and the training samples behind it.

const LISTS = [
  { kind: "similar", title: "Most similar", words: () => "largest kernel value", unit: "κ" },
  { kind: "helpful", title: "Most helpful", words: (k) => `raise the logit of ${k} most`, unit: "A" },
  { kind: "harmful", title: "Most harmful", words: (k) => `lower the logit of ${k} most`, unit: "A" },
];

const tag = (kind, words, title) => el("span", { class: `tag ${kind}`, title }, words);

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

// ---- verdict and probabilities --------------------------------------------------------------------------------------

function verdict(at) {
  const view = VIEWS[state.view];
  const said = SAID[at];
  const stand = array(view.said)[at];
  const right = said === TRUTH[at];
  const item = (what, words, p, good) =>
    el(
      "div",
      {},
      el("dt", {}, what),
      el(
        "dd",
        { class: good === undefined ? "" : good ? "good" : "bad" },
        el("strong", {}, words),
        !missing(p) && el("span", { class: "p" }, percent(p))
      )
    );
  const off = array(view.off)[at];
  const similar = neighbours(at, state.view, "similar", 0);
  const same = similar.filter((n) => n.truth === TRUTH[at]).length;
  const dirty = similar.filter((n) => n.poisoned).length;
  const agree =
    said === stand
      ? `The ${view.name} surrogate agrees with the network`
      : `The ${view.name} surrogate does not agree with the network`;
  const far =
    Math.abs(off) < 1
      ? "and is about as sure"
      : off > 0
        ? "and is surer of the true class than the network"
        : "and is less sure of the true class than the network";
  return el(
    "div",
    { class: "verdict" },
    el(
      "dl",
      {},
      item("True class", name(TRUTH[at])),
      item("Network says", name(said), probability(at, state.view, said, "network"), right),
      item("Surrogate says", name(stand), probability(at, state.view, stand, "surrogate"), stand === TRUTH[at])
    ),
    el(
      "p",
      { class: "tags" },
      !right && tag("wrong", "misclassified"),
      said !== stand && tag("split", "disagreement"),
      POISONED && POISONED[at] ? tag("poison", "poisoned") : null,
      view.flagged && array(view.flagged)[at] ? tag("poison", "flagged", "most of its neighbours are poisoned") : null
    ),
    el(
      "p",
      { class: "sentence" },
      `${agree}, ${far} (after the map, log-odds off by `,
      el("span", { id: "off", "data-value": off }, signed(off, 2)),
      "). ",
      `${same} of its ${similar.length} most similar training samples are of the true class`,
      TRAIN.poisoned ? `, ${dirty} poisoned.` : "."
    )
  );
}

function probabilityTable(at) {
  const { found, rest } = probabilities(at, state.view);
  const line = (words, p, k) =>
    el(
      "tr",
      { "data-class": k, class: k === TRUTH[at] ? "truth" : null },
      el("th", { scope: "row", title: words }, el("span", {}, words), k === TRUTH[at] && el("small", {}, "true")),
      el(
        "td",
        { class: "bars", "aria-hidden": "true" },
        el("i", { class: "network", style: { width: `${100 * p.network}%` } }),
        el("i", { class: "surrogate", style: { width: `${100 * p.surrogate}%` } })
      ),
      el("td", { class: "network", "data-value": p.network }, percent(p.network)),
      el("td", { class: "surrogate", "data-value": p.surrogate }, percent(p.surrogate))
    );
  const longest = Math.max(...found.map((p) => name(p.k).length + (p.k === TRUTH[at] ? 5 : 1)), 9);
  const long = longest > 20;
  return el(
    "div",
    { class: `probabilities ${long ? "long" : ""}` },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el(
            "th",
            { scope: "col", style: long ? {} : { width: `${longest + 1}ch` } },
            el("span", { class: "hidden" }, "Class")
          ),
          el("th", { "aria-hidden": "true" }),
          el("th", { scope: "col", class: "network" }, "network"),
          el("th", { scope: "col", class: "surrogate" }, "surrogate")
        )
      ),
      el(
        "tbody",
        {},
        found.map((p) => line(name(p.k), p, p.k)),
        rest && line(`${CLASSES.length - found.length} others`, rest, "rest")
      )
    )
  );
}

// ---- training samples -----------------------------------------------------------------------------------------------

function neighbourLists(at) {
  const output = row(VIEWS[state.view].outputs, at)[state.output];
  return LISTS.map(({ kind, title, words, unit }) => {
    const found = neighbours(at, state.view, kind, state.output);
    const same = found.filter((n) => n.truth === TRUTH[at]).length;
    return el(
      "section",
      { class: `neighbours ${kind}`, "data-list": kind, "aria-label": `${title} training samples` },
      el("h4", {}, title, el("span", {}, `${words(name(output))} · ${same} of ${found.length} of the true class`)),
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

function caption(at, n, unit) {
  const strange = n.truth !== TRUTH[at];
  const shown = unit === "κ" ? num(n.value) : signed(n.value);
  return [
    el(
      "span",
      { class: "class", title: name(n.truth) },
      strange && el("b", { title: "not of the true class" }, "≠"),
      name(n.truth)
    ),
    el("span", { class: "amount", title: unit === "κ" ? "kernel value" : "attribution" }, shown),
    el("span", { class: "index" }, `#${n.index}`),
    n.poisoned && tag("poison", "poisoned"),
  ];
}

function tile(at, n, unit) {
  const strange = n.truth !== TRUTH[at];
  const words =
    `training sample ${n.index}, class ` +
    `${name(n.truth)}${strange ? ", not the true class" : ""}${n.poisoned ? ", poisoned" : ""}, ` +
    `${unit === "κ" ? "kernel value" : "attribution"} ${num(n.value)}`;
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
  const own = cells("test", at);
  const line = (n) =>
    el(
      "tr",
      { class: `${n.truth !== TRUTH[at] ? "strange" : ""} ${n.poisoned ? "poisoned" : ""}` },
      el(
        "th",
        { scope: "row" },
        el(
          "button",
          {
            type: "button",
            class: "tile plain",
            "data-index": n.index,
            "data-value": n.value,
            "data-class": n.truth,
            onclick: () => openTraining(n.place),
          },
          el("span", { class: "caption" }, caption(at, n, unit))
        )
      ),
      Array.from(cells("train", n.place), (v) => el("td", {}, num(v, 3)))
    );
  return el(
    "div",
    { class: "wide", tabindex: 0, role: "region", "aria-label": "Training samples" },
    el(
      "table",
      { class: "cells across" },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col" }, "training sample"),
          LOOK.columns.map((c) => el("th", { scope: "col", title: c }, c))
        )
      ),
      el(
        "tbody",
        {},
        el(
          "tr",
          { class: "own" },
          el("th", { scope: "row" }, "this sample"),
          Array.from(own, (v) => el("td", {}, num(v, 3)))
        ),
        found.map(line)
      )
    )
  );
}

// A training sample by itself, and the decisions in which it has a part.
function openTraining(place) {
  const n = training(place);
  const inside = mentions(place, state.view);
  const link = (at) =>
    el(
      "button",
      {
        type: "button",
        class: "link",
        onclick: () => {
          dialog.close();
          explore({ at });
        },
      },
      `#${SHOWN[at]} ${name(TRUTH[at])}`
    );
  const part = (kind, words) =>
    inside[kind].length > 0 &&
    el(
      "p",
      {},
      `${words} for ${plural(inside[kind].length, "explained sample")}: `,
      inside[kind].slice(0, 12).map((at, k) => [k ? ", " : "", link(at)]),
      inside[kind].length > 12 && " …"
    );
  const dialog = el(
    "dialog",
    {
      class: "training",
      "aria-label": `Training sample ${n.index}`,
      onclose: () => dialog.remove(),
      onclick: (event) => event.target === dialog && dialog.close(),
    },
    el(
      "div",
      { class: "inside" },
      el(
        "div",
        { class: "row" },
        el("h3", {}, `Training sample #${n.index}`),
        el("button", { type: "button", class: "icon", "aria-label": "Close", onclick: () => dialog.close() }, "✕")
      ),
      el("p", {}, "Class ", el("strong", {}, name(n.truth)), " ", n.poisoned && tag("poison", "poisoned")),
      look("train", place, n.index, true),
      el("p", { class: "caption" }, `With ${VIEWS[state.view].name}, for what the network said:`),
      part("similar", "Among the most similar"),
      part("helpful", "Among the most helpful"),
      part("harmful", "Among the most harmful")
    )
  );
  document.body.append(dialog);
  dialog.showModal();
}

// ---- attribution by class -------------------------------------------------------------------------------------------

function attribution(at) {
  const room = el("div", { class: "chart", id: "boxes" });
  const outputs = row(VIEWS[state.view].outputs, at);
  const { rows, rest, total } = boxes(at, state.view, state.output);
  const chosen = outputs[state.output];
  const range = choice(
    "Range of the axis",
    [
      { key: "whole", label: "With outliers" },
      { key: "boxes", label: "Boxes only" },
    ],
    (key) => change({ range: key })
  );
  range.press(state.range);
  const draw = () =>
    room.replaceChildren(
      boxChart(
        room.clientWidth || 640,
        rows,
        (k) => (k === chosen ? "said" : ""),
        state.range === "whole",
        `Attribution to the logit of ${name(chosen)} by training class; the sum is ${num(total)}`
      )
    );
  sized(room, draw);
  const others = N.counts.by_class.length - rows.length;
  return el(
    "div",
    { class: "card attribution" },
    el(
      "div",
      { class: "row" },
      el("h3", {}, `What each class of training samples adds to the logit of ${name(chosen)}`),
      range
    ),
    room,
    el(
      "p",
      { class: "total" },
      rest !== null && `${plural(others, "other class", "other classes")} together: ${signed(rest)}. `,
      "All training samples together: ",
      el("strong", { id: "total", "data-value": total }, num(total, 4)),
      `, the surrogate’s logit of ${name(chosen)}.`
    ),
    el(
      "p",
      { class: "caption" },
      "Box: the middle half of the attributions of a class’s training samples; thin line: median; strong " +
        "line: mean; whiskers: to the last sample within 1.5 quartile ranges; circles: the farthest beyond."
    )
  );
}

// ---- together -------------------------------------------------------------------------------------------------------

// Why a logit is explained: the network said it, it would have been right, or it came close.
function part(at, k, q) {
  if (k === SAID[at]) return "what the network said";
  if (k === TRUTH[at]) return "the true class";
  return q === 1 ? "runner-up" : `number ${q + 1}`;
}

function sample(at) {
  const outputs = row(VIEWS[state.view].outputs, at);
  const which = choice(
    "Explained output",
    Array.from(outputs, (k, q) => ({ key: q, label: [name(k), el("small", {}, part(at, k, q))] })),
    (key) => change({ output: Number(key) })
  );
  which.press(state.output);
  return [
    el(
      "div",
      { class: "card decision" },
      el(
        "div",
        { class: "row" },
        el("h3", { id: "sample-title" }, `Test sample #${SHOWN[at]}`),
        el("a", { class: "permalink", href: hash(), title: "A link to this sample and kernel" }, "link")
      ),
      el(
        "div",
        { class: `facing ${LOOK.kind}` },
        el("div", { class: "subject" }, look("test", at, SHOWN[at], true)),
        verdict(at),
        probabilityTable(at)
      )
    ),
    el(
      "div",
      { class: "card behind" },
      el("div", { class: "row" }, el("h3", {}, "The training samples behind it"), outputs.length > 1 && which),
      neighbourLists(at)
    ),
    attribution(at),
  ];
}
