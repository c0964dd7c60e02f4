// Who is taken for whom: the confusion matrix of the network, or of the chosen kernel's surrogate.

function confusion() {
  const classes = N.confusion.classes;
  const part = classes.length < CLASSES.length;
  const who = choice(
    "Whose decisions",
    [
      { key: "network", label: "Network" },
      { key: "surrogate", label: "Surrogate" },
    ],
    (key) => change({ who: key })
  );
  const table = matrix("Confusion matrix", classes, "true ↓ said →", {
    rows: (i) => {
      const counts = array(state.who === "network" ? N.confusion.network : VIEWS[state.view].confusion);
      return counts.subarray(i * (classes.length + 1), (i + 1) * (classes.length + 1));
    },
    cell: (value) => value && count(value),
    say: (value, truth, said) =>
      `${count(value)} of true class ${name(truth)} taken for ${said === null ? "a class not shown" : name(said)}`,
    open: (truth, said) =>
      explore({
        filter: "all",
        truth,
        said: state.who === "network" ? said : null,
        surrogate: state.who === "network" ? null : said,
      }),
  });
  watch(["view", "who"], () => {
    who.press(state.who);
    table.draw();
  });
  return el(
    "div",
    { class: "card" },
    el("div", { class: "row" }, el("h3", {}, "Who is taken for whom"), who),
    table,
    el(
      "p",
      { class: "caption" },
      part
        ? `The ${classes.length} of ${CLASSES.length} classes that the network confuses most; “other” are all ` +
            "not shown. "
        : "",
      `Counts over all test samples. A ${PRESS} on a number shows those of them that are explained below.`,
      scrolled(classes)
    )
  );
}
