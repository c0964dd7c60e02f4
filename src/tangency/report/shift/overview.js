// The first section: is there a shift, how large is it, and what differs.

function shiftCards() {
  const shown = Array.from(C.p).filter(differs).length;
  return el(
    "div",
    { class: "cards" },
    card("p-value", pValue(D.p), `MMD ${pValue(D.mmd.p)}, classifier ${pValue(D.classifier.p)}; twice the smaller`, {
      id: "p-value",
    }),
    card(
      "told apart (AUROC)",
      D.classifier.auc.toFixed(2),
      `${D.classifier.low.toFixed(2)} to ${D.classifier.high.toFixed(2)}; 0.5 is chance, 1 always right`,
      { id: "auroc" }
    ),
    card("components that differ", `${shown} of ${C.p.length}`, `each by itself, at ${percent(D.level)} for all`, {
      id: "components-differ",
    }),
    D.classes &&
      card(
        `balance of the ${D.classes.of}`,
        differs(D.classes.balance_p) ? "differs" : "no difference found",
        `p = ${pValue(D.classes.balance_p)}`,
        { id: "balance" }
      )
  );
}

function shiftHero() {
  return el(
    "section",
    { id: "overview", "aria-labelledby": "shift-title" },
    el("p", { class: "kicker" }, "Did the data shift?"),
    el(
      "h1",
      { id: "shift-title" },
      SIDE.train,
      el("span", { class: "on" }, " against "),
      SIDE.test
    ),
    el(
      "p",
      { class: "intro" },
      D.shifted ? "The two sets differ" : "No difference was found between the two sets",
      ABOUT.model ? ` as ${D.layer} of ${ABOUT.model} sees them` : "",
      `: ${count(D.source.count)} source samples against ${count(D.target.count)} target samples.`
    ),
    D.warnings.map((words) => el("p", { class: "caution", role: "note" }, el("strong", {}, "Caution: "), words)),
    shiftCards(),
    el(
      "div",
      { class: "card" },
      el("h2", { class: "small" }, "What was found"),
      el("ul", { class: "sentences", id: "shift-words" }, D.words.map((words) => el("li", {}, words)))
    )
  );
}
