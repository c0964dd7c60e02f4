// What each class of training samples adds to a logit.

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
