// What nothing is like, and where the network is wrong.

function outliersCard(set, found, title, none) {
  const index = array(found.index);
  const left = array(found.unexplained);
  return el(
    "div",
    { class: "card", id: `unlike-${set}` },
    el("h3", {}, title),
    el(
      "p",
      { class: "caption" },
      found.count
        ? `${plural(found.count, "sample")} of which the others explain little: more than ${percent(found.limit)} is ` +
            `left open.${found.count > index.length ? ` The first ${index.length} are shown.` : ""}`
        : none
    ),
    found.count > 0 &&
      some(index.length, (k) =>
        el(
          "li",
          {},
          sampleTile(set, index[k], {
            words: `${percent(left[k])} left open`,
            notes: [el("span", { class: "amount", title: "the part that the others leave open" }, percent(left[k]))],
          })
        )
      )
  );
}

function unlike() {
  return section(
    "unlike",
    "Samples that nothing is like",
    "The kernel machine knows little about these: a prediction there is a guess, and some of them do not belong here.",
    el(
      "div",
      { class: A.test_outliers ? "two" : "stack" },
      outliersCard("train", A.outliers, "Training samples", "Every training sample is like others in the training set."),
      A.test_outliers &&
        outliersCard("test", A.test_outliers, "Test samples", "Every test sample is like some training samples.")
    )
  );
}

const capital = (words) => words.slice(0, 1).toUpperCase() + words.slice(1);

function regions() {
  const set = A.tests === null ? "train" : "test";
  const whole = set === "train" ? "training" : "test";
  const one = (region, k) =>
    el(
      "div",
      { class: "card region" },
      el("h3", {}, `Region ${k + 1}: ${count(region.mistakes)} of ${count(region.size)} ${whole} samples wrong`),
      el("p", { class: "sentence" }, `Elsewhere ${percent(region.elsewhere)} are. ${capital(region.why)}`),
      some(region.samples.shape[0], (place) => el("li", {}, sampleTile(set, array(region.samples)[place])))
    );
  const none = A.real
    ? "Regions are looked for where there are classes; these targets are numbers."
    : "No region stands out: mistakes are spread as chance would spread them.";
  return section(
    "regions",
    "Where the mistakes are",
    A.regions.length
      ? `Groups of ${whole} samples that are alike to the network and wrong more often than elsewhere, and why.`
      : none,
    A.regions.length > 0 && el("div", { class: "stack" }, A.regions.map(one))
  );
}
