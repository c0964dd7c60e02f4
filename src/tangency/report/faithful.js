// How well the surrogate of the chosen kernel follows the network: sample by sample.

function faithful() {
  const room = el("div", { class: "chart", id: "scatter" });
  const tip = el("div", { class: "tip", hidden: true });
  const said = el("p", { class: "caption" });
  const title = el("h3", {});
  let chart;
  const index = array(N.scatter.index);
  const right = array(N.scatter.right);
  const network = array(N.scatter.network);
  const hover = (p, x, y) => {
    tip.hidden = !p;
    if (!p || tip.dataset.at === String(p.at)) return;
    tip.dataset.at = p.at;
    const words =
      `${name(TRUTH[p.at])}: network ${percent(1 / (1 + Math.exp(-p.y)))}, surrogate ` +
      `${percent(1 / (1 + Math.exp(-p.x)))}`;
    tip.replaceChildren(
      ...[PICTURES && picture("test", p.at), el("span", {}, el("strong", {}, `#${SHOWN[p.at]} `), words)].filter(
        Boolean
      )
    );
    tip.style.left = `${Math.min(x + 14, room.clientWidth - tip.offsetWidth - 4)}px`;
    tip.style.top = `${y + 14}px`;
  };
  const draw = () => {
    const view = VIEWS[state.view];
    const x = array(view.scatter);
    const points = Array.from(index, (i, k) => ({ x: x[k], y: network[k], right: right[k], at: PLACE.get(i) }));
    tip.hidden = true;
    tip.dataset.at = "";
    chart = scatterChart(room.clientWidth || 560, points, view.line.map(array), {
      open: (at) => explore({ at }),
      hover,
      title:
        `Network’s against ${view.name} surrogate’s probability of the true class, ${points.length} test ` +
        `samples. Kendall’s tau ${num(view.faithful.tau)}.`,
    });
    chart.choose(state.at);
    room.replaceChildren(chart, tip);
    title.textContent = `Confidence in the true class: network and ${view.name}`;
    const drawn =
      index.length < N.counts.test
        ? `${count(index.length)} of ${count(N.counts.test)} test samples: the ${count(SHOWN.length)} ` +
          "explained below, the others at random. "
        : "";
    said.textContent =
      `${drawn}Each mark is a test sample; strong ones open below on a ${PRESS}. On the line the surrogate says ` +
      "just what the network says, up to an increasing map. Both axes are in log-odds, so that 99% and 99.9% " +
      "are far apart.";
  };
  watch(["view"], draw);
  watch(["at"], () => chart.choose(state.at));
  sized(room, draw);
  return section(
    "faithful",
    "Can the stand-in be trusted?",
    "Where the marks follow the line, the surrogate orders decisions as the network does, and its " +
      "explanations are of this network. Marks far off are decisions that it does not explain.",
    el(
      "div",
      { class: "two" },
      el(
        "div",
        { class: "card" },
        title,
        el(
          "p",
          { class: "key" },
          key("dot", "network right"),
          key("cross", "network wrong"),
          key("line", "best increasing map")
        ),
        room,
        said
      ),
      confusion()
    )
  );
}
