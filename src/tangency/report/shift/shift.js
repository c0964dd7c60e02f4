// The sections, what is chosen at the start, and what the words mean.

const farthest = SHOWN_COMPONENTS.slice().sort((a, b) => C.distance[b] - C.distance[a]);
Object.assign(state, {
  x: Math.min(farthest[0], farthest[1] ?? farthest[0]),
  y: Math.max(farthest[0], farthest[1] ?? farthest[0]),
  keep: LIKELIER || Math.max(1, Math.round(RATIO.length / 10)),
});

SECTIONS.push(
  { id: "overview", words: "Found", make: shiftHero },
  ...(SHOWN_COMPONENTS.length > 1 ? [{ id: "picture", words: "Picture", make: plane }] : []),
  { id: "components", words: "Components", make: carrying },
  { id: "carriers", words: "Samples", make: carriers },
  { id: "filter", words: "Filter", make: filtering }
);

WORDS.push(
  ["source, target", "The data that are there, and the data that they are compared with."],
  ["MMD", "Maximum mean discrepancy: how far the means of two sets lie apart under a kernel, here a Gaussian one."],
  [
    "AUROC",
    "How often a classifier gives a target sample the higher score of a source and a target sample that it has not seen.",
  ],
  ["p-value", "How likely so large a difference is by chance alone; by permutation. It says nothing of its size."],
  ["component", "A principal component of what the layer puts out for both sets together."],
  ["Holm", "A correction of many p-values: at 5 %, in one of twenty cases any component is said to differ that does not."],
  ["ratio", "How much likelier a sample is in one set than in the other, by logistic regression that has not seen it."]
);

METHODS.push(
  "Vargas, Tsou et al. 2023, “Foundation model’s embedded representations may detect distribution shift”; Gretton et al. " +
    "2012, “A kernel two-sample test”; Lopez-Paz & Oquab 2017, “Revisiting classifier two-sample tests”."
);
