// Source samples that are like the target: how many to keep, and a file of those kept.

const ORDER = Array.from(RATIO.keys()).sort((a, b) => RATIO[b] - RATIO[a] || a - b);
const LIKELIER = ORDER.filter((k) => RATIO[k] > 0).length;
const BARS = 44;

// Bars of the log ratios of both sets, and where the cut is.
function ratioChart(width) {
  const height = 220;
  const box = { left: 40, right: width - 12, top: 22, bottom: height - 42 };
  const of = { train: RATIO, test: array(D.target.ratios) };
  // Beyond these a sample is certain; one far away would leave no room for the others.
  const inside = [...of.train, ...of.test].sort((a, b) => a - b);
  const [low, high] = [inside[Math.floor(0.002 * inside.length)], inside[Math.floor(0.998 * (inside.length - 1))] + 1e-9];
  const step = (high - low) / BARS || 1;
  const bars = Object.fromEntries(
    SIDES.map((set) => {
      const tally = new Array(BARS).fill(0);
      for (const v of of[set]) tally[Math.max(0, Math.min(BARS - 1, Math.floor((v - low) / step)))] += 1 / of[set].length;
      return [set, tally];
    })
  );
  const most = Math.max(...SIDES.flatMap((set) => bars[set]));
  const sx = linear(low, low + BARS * step, box.left, box.right);
  const sy = linear(0, most, box.bottom, box.top);
  const cut = RATIO[ORDER[state.keep - 1]];
  const at = Math.max(box.left, Math.min(box.right, sx(cut)));
  const end = at > box.right - 60;
  return frame(
    width,
    height,
    `Log ratio of the densities for both sets; ${count(state.keep)} source samples are kept`,
    bottom(
      ticks(low, high, (box.right - box.left) / 74).map((t) => ({ x: sx(t), words: num(t, 2) })),
      box.bottom,
      box.top
    ),
    SIDES.map((set) => {
      const points = bars[set].flatMap((v, k) => [
        [sx(low + k * step), sy(v)],
        [sx(low + (k + 1) * step), sy(v)],
      ]);
      const d = [[box.left, box.bottom], ...points, [box.right, box.bottom]];
      return svg("path", {
        d: `M${d.map((p) => p.map((v) => v.toFixed(1)).join(" ")).join("L")}Z`,
        class: `hill ${LETTER[set]}`,
      });
    }),
    svg("line", { x1: at, x2: at, y1: box.top - 6, y2: box.bottom, class: "cut" }),
    label(at + (end ? -6 : 6), 14, end ? "kept →" : "kept →", { "text-anchor": end ? "end" : "start", class: "tick" }),
    label((box.left + box.right) / 2, height - 6, `log of how much likelier in ${SIDE.test}`, {
      "text-anchor": "middle",
      class: "axis",
    })
  );
}

// Of the samples kept: weights with mean 1, in proportion to the ratio of the densities.
function weightsOf(kept) {
  const top = RATIO[kept[0]];
  const raw = kept.map((k) => Math.exp(RATIO[k] - top));
  const mean = raw.reduce((a, b) => a + b, 0) / raw.length;
  return raw.map((v) => v / mean);
}

const digits = (v) => Number(v.toPrecision(6));

function keptJson() {
  const kept = ORDER.slice(0, state.keep);
  const weights = weightsOf(kept);
  const whole = {
    tangency_shift: 1,
    source: SIDE.train,
    target: SIDE.test,
    samples: RATIO.length,
    kept: kept.map((sample, k) => ({
      sample,
      ...(D.ids && { id: D.ids[sample] }),
      log_ratio: digits(RATIO[sample]),
      weight: digits(weights[k]),
    })),
  };
  return `${JSON.stringify(whole, null, 1)}\n`;
}

function keptCsv() {
  const kept = ORDER.slice(0, state.keep);
  const weights = weightsOf(kept);
  // What a spreadsheet would take for a formula gets a ' in front.
  const cell = (words) => {
    const safe = /^['\t\r\n]|^\s*[=+\-@＝＋－＠]/.test(words) ? `'${words}` : words;
    return /[",\r\n]|^\s|\s$/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const lines = kept.map((sample, k) =>
    [sample, ...(D.ids ? [cell(D.ids[sample])] : []), digits(RATIO[sample]), digits(weights[k])].join(",")
  );
  return `${["sample", ...(D.ids ? ["id"] : []), "log_ratio", "weight"].join(",")}\r\n${lines.join("\r\n")}\r\n`;
}

function save(name, kind, words) {
  const link = el("a", { href: URL.createObjectURL(new Blob([words], { type: kind })), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function filtering() {
  const room = el("div", { class: "chart", id: "ratio-chart" });
  const draw = () => room.replaceChildren(ratioChart(room.clientWidth || 560));
  sized(room, draw);
  const said = el("p", { class: "sentence", id: "kept-words", "aria-live": "polite" });
  const slider = el("input", {
    type: "range",
    id: "keep",
    min: 1,
    max: RATIO.length,
    "aria-label": "source samples to keep",
    oninput: () => change({ keep: Number(slider.value) }),
  });
  watch(["keep"], () => {
    slider.value = state.keep;
    const weights = weightsOf(ORDER.slice(0, state.keep));
    const effective = weights.length ** 2 / weights.reduce((a, b) => a + b * b, 0);
    said.textContent =
      `${count(state.keep)} of ${count(RATIO.length)} ${SIDE.train} samples are kept, the most like ${SIDE.test}; ` +
      `with their weights they are worth ${count(Math.round(effective))} of ${SIDE.test}’s.`;
    draw();
  });
  const last = state.keep;
  return section(
    "filter",
    `Which of ${SIDE.train} are like ${SIDE.test}`,
    "Train on these, or weight them: the ratio of the densities is estimated without the sample, and uses no labels.",
    el(
      "div",
      { class: "card" },
      el("p", { class: "key" }, SIDES.map((set) => key(`side-${LETTER[set]}`, SIDE[set]))),
      room,
      el("div", { class: "keeping" }, slider),
      said,
      el(
        "div",
        { class: "buttons" },
        el("button", { type: "button", onclick: () => change({ keep: last }) }, "Likelier in the target"),
        el("button", { type: "button", id: "export-json", onclick: () => save("kept.json", "application/json", keptJson()) }, "Save as JSON"),
        el("button", { type: "button", id: "export-csv", onclick: () => save("kept.csv", "text/csv", keptCsv()) }, "Save as CSV")
      ),
      el(
        "p",
        { class: "caption" },
        "Whether it helps depends on the task: found.downstream(labels) trains a probe on the filtered samples, on as many " +
          "random ones and on all, and says which is right more often on the target."
      )
    )
  );
}
