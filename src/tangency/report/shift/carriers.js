// Which samples carry the shift: those of each set that are least like the other.

function carriers() {
  const one = (set) => {
    const listed = array(POINTS[set].carriers);
    const ratios = array(POINTS[set].carried);
    return el(
      "div",
      { class: "card", id: `carriers-${ROLE[set]}` },
      el("h3", {}, el("i", { class: `swatch side-${LETTER[set]}` }), ` ${SIDE[set]}: least like ${SIDE[set === "train" ? "test" : "train"]}`),
      someOf(listed.length, (k) =>
        el("li", {}, sampleTile(set, listed[k], brief(ratios[k]), likelier(ratios[k])))
      )
    );
  };
  return section(
    "carriers",
    "Which samples carry it",
    D.shifted
      ? "The samples for which a classifier that has not seen them is surest of their set."
      : "No shift was shown, so these are the samples that would carry one; they may be there by chance.",
    el("div", { class: "two even" }, one("train"), one("test"))
  );
}

// A ratio of densities, short.
const brief = (ratio) => {
  const times = Math.exp(Math.abs(ratio));
  return times > 1e4 ? "> 10,000 ×" : `${times >= 10 ? count(Math.round(times)) : times.toFixed(1)} ×`;
};
