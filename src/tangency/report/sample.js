// One decision: the sample, and what was said about it.

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
