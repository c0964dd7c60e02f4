// Samples that are there twice: within the training set, and in the test set too.

function pair(copies, k, sets) {
  const [first, second] = row(copies.pairs, k);
  const equal = array(copies.equal)[k];
  const differ = array(copies.differ)[k];
  return el(
    "li",
    { class: `pair ${differ ? "differ" : ""}` },
    el("div", { class: "both-of" }, sampleTile(sets[0], first), sampleTile(sets[1], second)),
    el(
      "p",
      { class: "tags" },
      equal ? tag("best", "equal", "the inputs are equal") : tag("split", "near", "far nearer than by chance"),
      differ ? tag("wrong", "different labels") : null,
      el("span", { class: "caption" }, `cosine ${num(array(copies.similarity)[k])}`)
    )
  );
}

function pairsCard(id, title, copies, sets, none, words) {
  return el(
    "div",
    { class: "card", id },
    el("h3", {}, title),
    el(
      "p",
      { class: "caption" },
      copies.count
        ? `${plural(copies.count, "pair")}: ${count(copies.exact)} equal` +
            (A.real ? ". " : `, ${count(copies.contradictory)} with different labels. `) +
            words +
            (copies.count > copies.pairs.shape[0] ? ` The first ${copies.pairs.shape[0]} are shown.` : "")
        : none
    ),
    copies.count > 0 && some(copies.pairs.shape[0], (k) => pair(copies, k, sets), 8)
  );
}

function copies() {
  return section(
    "copies",
    "Samples that are there twice",
    "Copies that carry different labels cannot both be right; those in the test set make its score too good.",
    el(
      "div",
      { class: "two" },
      pairsCard(
        "copies-within",
        "Within the training set",
        A.copies,
        ["train", "train"],
        "No training samples are copies of one another.",
        "Equal inputs, or far nearer than their other neighbours let expect."
      ),
      A.leaks
        ? pairsCard(
            "leaks",
            "In the test set and in the training set",
            A.leaks,
            ["test", "train"],
            "No test sample is in the training set.",
            "At the left the test sample."
          )
        : el(
            "div",
            { class: "card", id: "leaks" },
            el("h3", {}, "In the test set and in the training set"),
            el("p", { class: "caption" }, "There was no test set to look into.")
          )
    )
  );
}
