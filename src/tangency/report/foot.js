// How it was computed, what was left out, and what the words mean.

const WORDS = [
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
];

// A fact of any kind in words.
function fact(value) {
  if (value === null) return "–";
  if (typeof value === "number") return Number.isInteger(value) ? count(value) : num(value, 4);
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.map(fact).join(", ");
  if (typeof value === "object")
    return Object.entries(value)
      .map(([k, v]) => `${k}: ${fact(v)}`)
      .join(", ");
  return value;
}

function foot() {
  const paper = "https://arxiv.org/abs/2305.14585";
  by("foot").append(
    el(
      "div",
      { class: "columns" },
      el(
        "div",
        {},
        el("h2", { class: "small" }, "How it was computed"),
        el(
          "dl",
          { class: "facts" },
          Object.entries(ABOUT.facts).map(([k, v]) => [el("dt", {}, k.replaceAll("_", " ")), el("dd", {}, fact(v))])
        ),
        el("h2", { class: "small" }, "What was kept, and what was left out"),
        el(
          "ul",
          { id: "notes" },
          ABOUT.notes.map((n) => el("li", {}, n))
        )
      ),
      el(
        "div",
        {},
        el("h2", { class: "small" }, "What the words mean"),
        el(
          "dl",
          {},
          WORDS.map(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])
        )
      )
    ),
    el(
      "p",
      { class: "paper" },
      "Method: Engel et al. 2024, ",
      el(
        "a",
        { href: paper, rel: "noreferrer" },
        "Faithful and efficient explanations for neural networks via neural tangent kernel surrogate models"
      ),
      ", ICLR 2024, arXiv:2305.14585. ",
      `Made by tangency ${ABOUT.version}. This file is complete: it loads nothing.`
    )
  );
}
