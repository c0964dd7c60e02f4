// One suspect: the sample, what is said about its label, its neighbours, and what to do with it.

function facing(at) {
  const item = (term, words, kind) =>
    el("div", {}, el("dt", {}, term), el("dd", { class: kind }, el("strong", {}, words)));
  const p = WRONG[at];
  return el(
    "div",
    { class: `facing suspect ${LOOK.kind}` },
    el("div", { class: "subject" }, look("train", PLACES.train.get(SUSPECTS[at]), SUSPECTS[at], true)),
    el(
      "div",
      { class: "verdict" },
      el(
        "dl",
        {},
        item(`Given ${what}`, given(at), p > 0.5 ? "bad" : ""),
        item(A.real ? "Predicted without it" : "Suggested", suggested(at), "good")
      )
    ),
    el(
      "dl",
      { class: "chances" },
      el(
        "div",
        {},
        el("dt", {}, "Probability of being wrong"),
        el(
          "dd",
          {},
          el("span", { id: "wrong", "data-value": p }, percent(p)),
          el("span", { class: "level", "aria-hidden": "true" }, el("i", { style: { width: `${100 * p}%` } }))
        )
      ),
      el(
        "div",
        {},
        el("dt", {}, A.real ? "Error, in its standard deviations" : "Margin without the sample"),
        el("dd", { id: "margin", "data-value": MARGIN[at] }, num(A.real ? -MARGIN[at] : MARGIN[at]))
      )
    ),
    actions(at)
  );
}

// ---- what to do -----------------------------------------------------------------------------------------------------

// Keep, fix or drop. `label`: the class that a fix gives, which can be chosen.
function actions(at) {
  const now = decided.get(SUSPECTS[at]);
  const button = (action, key, words, go) =>
    el(
      "button",
      {
        type: "button",
        id: action,
        class: `act ${action}`,
        "aria-pressed": String(now?.action === action),
        "aria-keyshortcuts": key,
        onclick: go,
      },
      words,
      !TOUCH && el("kbd", { "aria-hidden": "true" }, key)
    );
  const label = el(
    "select",
    {
      id: "fix-to",
      "aria-label": "Class that a fix gives",
      onchange: () => decided.get(SUSPECTS[at])?.action === "fix" && settle("fix", false),
    },
    A.classes.map((_, k) => k !== GIVEN?.[SUSPECTS[at]] && el("option", { value: k }, name(k)))
  );
  if (!A.real) label.value = now?.action === "fix" ? now.label : likeliest(at);
  return el(
    "div",
    { class: "actions", role: "group", "aria-label": `What to do with this ${what}` },
    button("keep", "a", "Keep", () => settle("keep")),
    !A.real &&
      el(
        "span",
        { class: "fixing" },
        button("fix", "f", "Fix to", () => settle("fix")),
        label
      ),
    button("drop", "d", "Drop", () => settle("drop")),
    el("span", { class: "now", id: "now", role: "status" }, now ? `Decided: ${inWords(now)}` : "")
  );
}

// The suggested class; where that is the given one, the class most of its neighbours have, or any other.
function likeliest(at) {
  const own = GIVEN[SUSPECTS[at]];
  if (SUGGESTED[at] !== own) return SUGGESTED[at];
  const others = neighboursOf(at).filter((n) => n.differs);
  return others.length ? GIVEN[others[0].sample] : own === 0 ? 1 : 0;
}

// ---- neighbours -----------------------------------------------------------------------------------------------------

function around(at) {
  const found = neighboursOf(at);
  const against = found.filter((n) => n.differs).length;
  const tiles = found.map((n) =>
    el(
      "li",
      {},
      sampleTile("train", n.sample, {
        marked: n.differs ? "strange" : "",
        words: `cosine ${num(n.cosine)}${n.differs ? ", another label than the suspect" : ""}`,
        notes: [
          el("span", { class: "amount", title: "cosine: 1 is the same" }, num(n.cosine)),
          n.suspect && tag("wrong", "suspect", "its own label is more likely wrong than right"),
        ],
      })
    )
  );
  return el(
    "section",
    { class: "neighbours", "aria-label": "Most similar training samples" },
    el(
      "h4",
      {},
      "Most similar training samples",
      el(
        "span",
        {},
        "as the network sees them; cosine: 1 is the same",
        !A.real && ` · ${against} of ${found.length} have another label`
      )
    ),
    LOOK.kind === "rows" ? beside(at, found) : el("ol", { class: LOOK.kind }, tiles)
  );
}

// Rows of a table are compared with the suspect's own, column by column.
function beside(at, found) {
  const values = (sample) => cells("train", PLACES.train.get(sample));
  const line = (n) => ({
    kind: n.differs ? "strange" : "",
    head: sampleTile("train", n.sample, {
      marked: n.differs ? "strange" : "",
      words: `cosine ${num(n.cosine)}`,
      notes: [el("span", { class: "amount" }, num(n.cosine)), n.suspect && tag("wrong", "suspect")],
    }),
    values: values(n.sample),
  });
  const own = { words: "the suspect", values: values(SUSPECTS[at]) };
  return comparedRows("The suspect and its neighbours", own, found.map(line));
}

function suspectCard(at) {
  const sample = SUSPECTS[at];
  return [
    el(
      "div",
      { class: "row" },
      el("h3", { id: "suspect-title" }, `Training sample #${sample}`),
      el(
        "span",
        { class: "permalink" },
        A.ids && [el("span", { class: "id" }, A.ids[sample]), " · "],
        `number ${count(at + 1)} in suspicion`
      )
    ),
    facing(at),
    around(at),
  ];
}
