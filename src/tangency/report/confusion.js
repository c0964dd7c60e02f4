// Who is taken for whom: the confusion matrix of the network, or of the chosen kernel's surrogate.

function confusion() {
  const room = el("div", { class: "wide both", tabindex: 0, role: "region", "aria-label": "Confusion matrix" });
  const readout = el("p", { class: "caption readout", "aria-hidden": "true" });
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
  const long = Math.max(...classes.map((k) => name(k).length)) > 3 || classes.length > 12;
  const draw = () => {
    who.press(state.who);
    const counts = array(state.who === "network" ? N.confusion.network : VIEWS[state.view].confusion);
    const k = classes.length;
    const rows = classes.map((truth, i) => {
      const numbers = counts.subarray(i * (k + 1), (i + 1) * (k + 1));
      const all = Math.max(
        1,
        numbers.reduce((a, b) => a + b, 0)
      );
      const cell = (said, j) => {
        const value = numbers[j];
        const kind = said === truth ? "hit" : value ? "miss" : "none";
        const words =
          `${count(value)} of true class ${name(truth)} taken for ` +
          `${said === null ? "a class not shown" : name(said)}`;
        const style = { "--part": `${Math.round(100 * (value ? 0.12 + 0.88 * Math.sqrt(value / all) : 0))}%` };
        const open =
          value && said !== null
            ? el(
                "button",
                {
                  type: "button",
                  title: words,
                  "aria-label": words,
                  onclick: () =>
                    explore({
                      filter: "all",
                      truth,
                      said: state.who === "network" ? said : null,
                      surrogate: state.who === "network" ? null : said,
                    }),
                },
                count(value)
              )
            : value
              ? el("span", { title: words }, count(value))
              : "·";
        return el("td", { class: kind, style: value ? style : null }, open);
      };
      return el(
        "tr",
        {},
        el("th", { scope: "row", title: name(truth) }, el("span", {}, name(truth))),
        classes.map(cell),
        part && cell(null, k)
      );
    });
    const head = classes.map((c) => el("th", { scope: "col", title: name(c) }, el("span", {}, name(c))));
    room.replaceChildren(
      el(
        "table",
        { class: `confusion ${long ? "long" : ""}` },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", { class: "corner" }, "true ↓ said →"),
            head,
            part && el("th", { scope: "col" }, el("span", {}, "other"))
          )
        ),
        el("tbody", {}, rows)
      )
    );
  };
  // Names that were too long for their place, and counts, are said below, also to a finger, which cannot hover.
  const read = (event) => {
    const found = event.target.closest?.("[title]");
    if (found) readout.textContent = found.title;
  };
  for (const kind of ["pointerover", "pointerdown", "focusin"]) room.addEventListener(kind, read);
  watch(["view", "who"], draw);
  return el(
    "div",
    { class: "card" },
    el("div", { class: "row" }, el("h3", {}, "Who is taken for whom"), who),
    room,
    readout,
    el(
      "p",
      { class: "caption" },
      part
        ? `The ${classes.length} of ${CLASSES.length} classes that the network confuses most; “other” are all ` +
            "not shown. "
        : "",
      `Counts over all test samples. A ${PRESS} on a number shows those of them that are explained below.`,
      classes.length > 12 && (TOUCH ? " Drag to see the rest; the names stay." : " Scroll to see the rest; the names stay.")
    )
  );
}
