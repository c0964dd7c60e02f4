// How it was computed, what was left out, and what the words mean.

const WORDS = []; // [word, what it means]
const METHODS = []; // what the method is, and where it comes from

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
          (ABOUT.notes.length ? ABOUT.notes : ["Nothing was left out."]).map((n) => el("li", {}, n))
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
      METHODS.map((said) => [said, " "]),
      `Made by tangency ${ABOUT.version}. This file is complete: it loads nothing.`
    )
  );
}
