// The sections of decisions, what stands in the bar for them, and the words that they use.

SECTIONS.push(
  { id: "overview", words: "Overview", make: hero },
  { id: "faithful", words: "Faithful?", make: faithful },
  { id: "why", words: "Decisions", make: explorer },
  { id: "kernel", words: "Kernel matrix", make: kernelItself }
);

TOOLS.push(() => {
  const views =
    VIEWS.length > 1
      ? choice(
          "Kernel",
          VIEWS.map((v, k) => ({
            key: k,
            title: v.title,
            label: [k < 9 && !TOUCH && el("small", { "aria-hidden": "true" }, String(k + 1)), v.name],
          })),
          (k) => change({ view: Number(k) })
        )
      : el("span", { class: "single", title: VIEWS[0].title }, VIEWS[0].name);
  views.id = "kernels";
  if (views.press)
    watch(["view"], () => {
      views.press(state.view);
      const button = views.children[state.view];
      views.scrollLeft = button.offsetLeft - views.offsetLeft - (views.clientWidth - button.offsetWidth) / 2;
    });
  return el("div", { class: "which" }, el("span", {}, "Kernel"), views);
});

WORDS.push(
  [
    "Kernel",
    "A number for each pair of samples: how alike they are to the network. Tangent kernels compare the " +
      "gradients of the network’s outputs with respect to its weights; the conjugate kernel compares its last " +
      "hidden layer.",
  ],
  [
    "Surrogate",
    "A kernel generalised linear model, softmax(W κ(x, X) + b), fitted on the training set to stand in for " +
      "the network.",
  ],
  [
    "Attribution",
    "A(x, xᵢ) = W_ci κ(x, xᵢ) + b_c / N: the part of training sample i in the surrogate’s logit of class c. " +
      "Over all N training samples these add up to the logit.",
  ],
  ["Helpful, harmful", "The training samples that raise, and those that lower, the chosen logit most."],
  ["Log-odds", "log p / (1 − p) of the probability p of the true class."],
  ["Least faithful", "Ordered by how far the network’s log-odds lie from the increasing map of the surrogate’s."],
);

METHODS.push([
  "Method: Engel et al. 2024, ",
  el(
    "a",
    { href: "https://arxiv.org/abs/2305.14585", rel: "noreferrer" },
    "Faithful and efficient explanations for neural networks via neural tangent kernel surrogate models"
  ),
  ", ICLR 2024, arXiv:2305.14585.",
]);
