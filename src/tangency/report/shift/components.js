// Which components carry the shift, and which classes.

// A bar for each component, as long as the sets are apart along it.
function componentsChart(width) {
  const order = Array.from(C.p.keys()).sort((a, b) => C.distance[b] - C.distance[a]).slice(0, 15);
  const most = Math.max(...order.map((k) => C.distance[k])) || 1;
  const height = 24 * order.length + 34;
  const box = { left: 112, right: width - 60, top: 4, bottom: height - 30 };
  const sx = linear(0, most, box.left, box.right);
  return frame(
    width,
    height,
    "How far the sets lie apart along each component, in standard deviations",
    bottom(
      ticks(0, most, (box.right - box.left) / 80).map((t) => ({ x: sx(t), words: num(t, 2) })),
      box.bottom,
      box.top
    ),
    order.map((k, at) => {
      const y = box.top + 24 * at;
      const words =
        `component ${k + 1}: ${num(C.distance[k])} apart, mean ${signed(C.difference[k])}, ` +
        `spread × ${num(C.spread[k])}, p = ${pValue(C.p[k])}, ${percent(C.explained[k])} of the variance`;
      return svg(
        "g",
        { class: "component", onclick: () => showComponent(k) },
        svg("title", {}, words),
        svg("rect", { x: 0, y, width, height: 23, class: "hit" }),
        label(box.left - 8, y + 16, `component ${k + 1}`, { "text-anchor": "end", class: "name" }),
        svg("rect", {
          x: box.left,
          y: y + 4,
          width: Math.max(1, sx(C.distance[k]) - box.left),
          height: 15,
          rx: 2,
          class: differs(C.p[k]) ? "bar-differs" : "bar-same",
        }),
        label(sx(C.distance[k]) + 6, y + 16, `p ${pValue(C.p[k])}`, { class: "tick" })
      );
    })
  );
}

// The component in the picture above, across.
function showComponent(k) {
  if (!SHOWN_COMPONENTS.includes(k)) return;
  change(k === state.y ? { x: k, y: state.x } : { x: k });
  by("picture").scrollIntoView({ behavior: "smooth" });
}

function classTable() {
  const c = D.classes;
  const [source, target, p] = [array(c.source), array(c.target), array(c.inputs_p)];
  return el(
    "div",
    { class: "wide", tabindex: 0, role: "region", "aria-label": "Classes of both sets" },
    el(
      "table",
      { class: "cells", id: "classes" },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          ["class", SIDE.train, SIDE.test, "p of its inputs"].map((words) => el("th", { scope: "col" }, words))
        )
      ),
      el(
        "tbody",
        {},
        c.names.map((words, k) =>
          el(
            "tr",
            {},
            el("th", { scope: "row" }, words),
            el("td", {}, percent(source[k])),
            el("td", {}, percent(target[k])),
            el(
              "td",
              {},
              Number.isNaN(p[k]) ? "too few" : pValue(p[k]),
              differs(p[k]) && [" ", tag("wrong", "differs")]
            )
          )
        )
      )
    )
  );
}

function carrying() {
  const room = el("div", { class: "chart", id: "components-chart" });
  sized(room, () => room.replaceChildren(componentsChart(room.clientWidth || 560)));
  const components = el(
    "div",
    { class: "card" },
    el("h3", {}, "Principal components"),
    el("p", { class: "key" }, key("differs", `differs (${percent(D.level)}, for all together)`), key("same", "may not")),
    room,
    el(
      "p",
      { class: "caption" },
      "Wasserstein’s distance in standard deviations; p by Kolmogorov and Smirnov, corrected by Holm. ",
      C.p.length > 15 && `The 15 of ${C.p.length} that lie farthest apart. `,
      `${capitalised(PRESS)} one to see it in the picture.`
    )
  );
  return section(
    "components",
    D.classes ? "Which components and classes differ" : "Which components differ",
    "How far the two sets lie apart along each component of the layer’s output.",
    D.classes
      ? el(
          "div",
          { class: "two" },
          components,
          el(
            "div",
            { class: "card" },
            el("h3", {}, D.classes.of === "labels" ? "Classes" : "Predicted classes"),
            classTable(),
            el(
              "p",
              { class: "caption" },
              "How frequent each class is, and whether its samples differ between the sets (MMD, corrected by Holm): a " +
                "shift of the balance alone leaves the inputs of each class as they are."
            )
          )
        )
      : components
  );
}

const capitalised = (words) => words.slice(0, 1).toUpperCase() + words.slice(1);
