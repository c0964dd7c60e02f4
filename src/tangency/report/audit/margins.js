// Margins of all samples, and which class is given in place of which.

// Bars side by side on a scale of square roots: a few suspects can be seen beside thousands of others.
function marginChart(width) {
  const { low, high, right, wrong, cut } = A.margins;
  const height = 260;
  const box = { left: 46, right: width - 12, top: 22, bottom: height - 42 };
  const most = Math.max(...right.map((v, k) => v + wrong[k]), 1);
  const sx = linear(low, high, box.left, box.right);
  const sy = (v) => box.bottom - Math.sqrt(v / most) * (box.bottom - box.top);
  const step = (high - low) / right.length;
  const bar = (k, from, upto, kind) =>
    upto > from &&
    svg("rect", {
      x: sx(low + k * step) + 0.5,
      width: Math.max(1, sx(low + (k + 1) * step) - sx(low + k * step) - 1),
      y: sy(upto),
      height: Math.max(1, sy(from) - sy(upto)),
      class: `bar-${kind}`,
    });
  const marks = [0, 1, 2, 3, 4, 5].flatMap((power) => [1, 3].map((v) => v * 10 ** power));
  const apart = marks.filter((v) => v <= most && sy(v) < box.bottom - 8 && sy(v) - sy(v * 3) > 12);
  const end = cut !== null && sx(cut) > box.right - 150; // else to the right of the line
  return frame(
    width,
    height,
    `Margins of ${count(A.samples)} samples: ${count(S.count)} suspects` +
      (cut === null ? "" : `, below ${num(cut)}`),
    bottom(
      ticks(low, high, (box.right - box.left) / 74).map((t) => ({ x: sx(t), words: num(t, 2) })),
      box.bottom,
      box.top
    ),
    left(
      apart.map((v) => ({ y: sy(v), words: count(v) })),
      box.left,
      box.right
    ),
    wrong.map((v, k) => bar(k, 0, v, "wrong")),
    right.map((v, k) => bar(k, wrong[k], wrong[k] + v, "right")),
    cut !== null && [
      svg("line", { x1: sx(cut), x2: sx(cut), y1: box.top - 6, y2: box.bottom, class: "cut" }),
      label(sx(cut) + (end ? -6 : 6), 14, `suspects below ${num(cut, 2)}`, {
        "text-anchor": end ? "end" : "start",
        class: "tick",
      }),
    ],
    label(0, 14, "samples", { class: "axis" }),
    label(
      (box.left + box.right) / 2,
      height - 6,
      A.real ? "less the error, in standard deviations" : "margin without the sample",
      { "text-anchor": "middle", class: "axis" }
    )
  );
}

const expected = (value) => (value >= 9.95 ? count(Math.round(value)) : value >= 0.05 ? value.toFixed(1) : "");

// The pairs of classes that are mixed up most, each with its interval; a click lists the suspects.
function mixedUp() {
  const { pairs } = A.mixed;
  if (!pairs.length) return el("p", { class: "empty" }, "No two classes are mixed up.");
  return el(
    "ol",
    { class: "mixed" },
    pairs.map(([from, to, number, low, high]) =>
      el(
        "li",
        {},
        el(
          "button",
          {
            type: "button",
            class: "link",
            title: "show the suspects of this pair",
            onclick: () => review({ given: from, suggested: to }),
          },
          name(from),
          " → ",
          name(to)
        ),
        el("span", { class: "amount" }, ` ${expected(number)}`),
        el("small", {}, ` ${expected(low) || "0"} to ${expected(high)}`)
      )
    )
  );
}

const FAR = "How far each target lies from what the others predict.";

function margins() {
  const room = el("div", { class: "chart", id: "margins-chart" });
  sized(room, () => room.replaceChildren(marginChart(room.clientWidth || 560)));
  const histogram = el(
    "div",
    { class: "card" },
    el("h3", {}, "Do the others agree?"),
    el("p", { class: "key" }, key("agree", "more likely right"), key("suspicious", "suspect")),
    room,
    el(
      "p",
      { class: "caption" },
      A.real
        ? "The error of what the others predict, in its standard deviations, of all training samples. "
        : "What the others give to the label less what they give to the likeliest other class, of all training " +
            "samples. Below zero they contradict the label. ",
      "The height grows with the square root of the count, so that few suspects can be seen."
    )
  );
  if (A.real) return section("margins", "How sure is it?", FAR, histogram);
  const { classes, counts } = A.mixed;
  const all = array(counts);
  const table = matrix("Given and real labels", classes, "given ↓ really →", {
    rows: (i) => all.subarray(i * (classes.length + 1), (i + 1) * (classes.length + 1)),
    cell: expected,
    say: (value, from, to) =>
      `${num(value)} samples labelled ${name(from)} are expected to be ` +
      (to === null ? "of a class not shown" : name(to)),
    open: (from, to) => review(from === to ? { given: from } : { given: from, suggested: to }),
  });
  table.draw();
  return section(
    "margins",
    "Which classes are mixed up?",
    "How far the other samples speak for each label, and how many labels of one class are expected to be of another.",
    el(
      "div",
      { class: "two" },
      el(
        "div",
        { class: "stack" },
        histogram,
        el("div", { class: "card" }, el("h3", {}, "Mixed up most: given → really"), mixedUp())
      ),
      el(
        "div",
        { class: "card" },
        el("h3", {}, "Estimated confusion of the labels"),
        table,
        el(
          "p",
          { class: "caption" },
          classes.length < CLASSES.length &&
            `The ${classes.length} of ${CLASSES.length} classes that are mixed up most; “other” are all not shown. `,
          `Expected numbers of samples, by their probabilities. A ${PRESS} on one lists its suspects.`,
          scrolled(classes)
        )
      )
    )
  );
}
