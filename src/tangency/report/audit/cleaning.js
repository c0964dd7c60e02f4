// What dropping or mending the suspects would do to the test score.

const ACCURACY = A.cleaning?.score === "accuracy";
const shownScore = (v) => (ACCURACY ? percent(v) : num(v));

function cleaningChart(width) {
  const { removed, dropped, mended, suspects } = A.cleaning;
  const height = 280;
  const box = { left: 58, right: width - 16, top: 24, bottom: height - 42 };
  const values = [...dropped, ...mended];
  const pad = Math.max(0.1 * (Math.max(...values) - Math.min(...values)), 5e-3 * Math.abs(Math.max(...values)), 1e-9);
  const [low, high] = [Math.min(...values) - pad, Math.max(...values) + pad];
  const marks = ticks(low, high, 5).filter((v) => v <= 1 || !ACCURACY);
  const digits = Math.max(0, -Math.floor(Math.log10(100 * (marks[1] - marks[0] || 0.01)) + 1e-9));
  const sx = linear(0, Math.max(1, ...removed), box.left, box.right);
  const sy = linear(low, high, box.bottom, box.top);
  const line = (of, kind) => [
    svg("path", {
      d: of.map((v, k) => `${k ? "L" : "M"}${sx(removed[k]).toFixed(1)} ${sy(v).toFixed(1)}`).join(""),
      class: `curve ${kind}`,
    }),
    of.map((v, k) =>
      svg(
        "circle",
        { cx: sx(removed[k]), cy: sy(v), r: 3.5, class: `spot ${kind}` },
        svg("title", {}, `${count(removed[k])} ${kind}: ${shownScore(v)}`)
      )
    ),
  ];
  const end = sx(suspects) > box.right - 110;
  return frame(
    width,
    height,
    `Test ${A.cleaning.score} by how many of the most suspicious samples are dropped or mended`,
    bottom(
      ticks(0, Math.max(1, ...removed), (box.right - box.left) / 74)
        .filter(Number.isInteger)
        .map((t) => ({ x: sx(t), words: count(t) })),
      box.bottom,
      box.top
    ),
    left(
      marks.map((v) => ({ y: sy(v), words: ACCURACY ? `${(100 * v).toFixed(digits)}%` : num(v) })),
      box.left,
      box.right
    ),
    svg("line", { x1: sx(suspects), x2: sx(suspects), y1: box.top - 6, y2: box.bottom, class: "cut" }),
    label(sx(suspects) + (end ? -6 : 6), 14, "all suspects", { "text-anchor": end ? "end" : "start", class: "tick" }),
    line(mended, "mended"),
    line(dropped, "dropped"),
    label((box.left + box.right) / 2, height - 6, "most suspicious samples", { "text-anchor": "middle", class: "axis" })
  );
}

function retrained(scores) {
  return el(
    "table",
    { class: "cells", id: "retrained" },
    el(
      "thead",
      {},
      el("tr", {}, el("th", { scope: "col" }, "network trained again"), el("th", { scope: "col" }, "test accuracy"))
    ),
    el(
      "tbody",
      {},
      Object.entries(scores).map(([how, score]) =>
        el("tr", {}, el("th", { scope: "row" }, how), el("td", {}, percent(score)))
      )
    )
  );
}

function cleaning() {
  const c = A.cleaning;
  const title = "What cleaning would do";
  if (!c) return section("cleaning", title, "There was no test set to measure it on.");
  if (!c.suspects)
    return section("cleaning", title, `No ${what} is more likely wrong than right: there is nothing to clean.`);
  const room = el("div", { class: "chart", id: "cleaning-chart" });
  sized(room, () => room.replaceChildren(cleaningChart(room.clientWidth || 560)));
  const better = A.real ? c.gain < 0 : c.gain > 0;
  const sure = Math.abs(c.gain) > 2 * c.error;
  return section(
    "cleaning",
    title,
    `Without its ${plural(c.suspects, "suspect")} the kernel machine’s ${c.score} on the test samples ` +
      (c.gain === 0
        ? "stays the same."
        : `changes by ${signed(c.gain, 2)} ± ${num(c.error, 2)}` +
          (sure ? `: it is ${better ? "better" : "worse"}.` : ", which may be chance.")),
    el(
      "div",
      { class: "card" },
      el("p", { class: "key" }, key("dropped", "dropped"), key("mended", `given the suggested ${what}`)),
      room,
      c.retrained && retrained(c.retrained),
      el(
        "p",
        { class: "caption" },
        "In closed form, without training: the kernel machine with the most suspicious samples dropped, or mended. " +
          "± is a standard error over the test samples." +
          (c.retrained ? "" : " tg.audit(…, retrain=…) checks it by training.")
      )
    )
  );
}
