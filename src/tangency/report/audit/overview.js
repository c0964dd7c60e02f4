// What was found, in figures and in sentences, and what makes it less certain.

const levelOf = (part) => `${Math.round(100 * part)}%`;

function figures() {
  const { noise, cleaning } = A;
  const go = (id) => ({ onclick: () => by(id).scrollIntoView({ behavior: "smooth" }) });
  const pairs = (copies) =>
    !copies.count
      ? "none was found"
      : `${count(copies.exact)} equal${A.real ? "" : `, ${count(copies.contradictory)} with different labels`} ↓`;
  return el(
    "div",
    { class: "cards many" },
    card(`Suspect ${what}s`, count(S.count), `of ${count(A.samples)} are more likely wrong than right ↓`, {
      id: "to-suspects",
      ...go("suspects"),
    }),
    card(
      `Wrong ${what}s in all`,
      percent(noise.rate),
      `${levelOf(noise.level)} interval ${percent(noise.low)} to ${percent(noise.high)}` +
        (noise.by_test ? ", with test samples" : ""),
      { id: "noise-rate" }
    ),
    card("Pairs of copies", count(A.copies.count), pairs(A.copies), go("copies")),
    A.leaks && card("Leaks, train and test", count(A.leaks.count), pairs(A.leaks), go("copies")),
    card(
      "Like nothing else",
      count(A.outliers.count),
      `training samples${A.test_outliers ? `, ${plural(A.test_outliers.count, "test sample")}` : ""} ↓`,
      go("unlike")
    ),
    cleaning &&
      card(
        "Without the suspects",
        `${signed(cleaning.gain, 2)}`,
        `± ${num(cleaning.error, 2)} test ${cleaning.score} ↓`,
        go("cleaning")
      )
  );
}

// Which kernel and reg, of those that were tried.
function choiceOf() {
  const { kernel, title, reg, tried } = A.choice;
  return el(
    "details",
    { class: "legend" },
    el("summary", {}, `Why the kernel ${kernel} with reg ${num(reg)}?`),
    el(
      "p",
      {},
      title && title !== kernel ? `${kernel}: ${title}. ` : "",
      `Of ${plural(tried.length, "choice")} of kernel and reg it predicts each ${what} from the others best: it has ` +
        "the least leave-one-out loss."
    ),
    el(
      "div",
      { class: "wide", tabindex: 0, role: "region", "aria-label": "Kernels and regs that were tried" },
      el(
        "table",
        { class: "cells tried" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            ["kernel", "reg", "leave-one-out loss", ""].map((head) => el("th", { scope: "col" }, head))
          )
        ),
        el(
          "tbody",
          {},
          tried.map(([own, value, loss, taken]) =>
            el(
              "tr",
              { class: taken ? "own" : "" },
              el("th", { scope: "row" }, own),
              el("td", {}, num(value)),
              el("td", {}, num(loss, 4)),
              el("td", {}, taken ? "taken" : "")
            )
          )
        )
      )
    )
  );
}

// The first section: on a page of its own it has the title of the page.
function auditHero() {
  const alone = !DATA.numbers;
  const title = A.real ? "Which targets are wrong?" : "Which labels are wrong?";
  const names = [ABOUT.model, ABOUT.data].filter(Boolean);
  const heads = alone
    ? [
        el("p", { class: "kicker" }, title),
        el(
          "h1",
          { id: "audit-title" },
          names.length ? names.map((v, k) => [k > 0 && el("span", { class: "on" }, " on "), v]) : "The training data"
        ),
      ]
    : el("h2", { id: "audit-title" }, title);
  return el(
    "section",
    { id: alone ? "overview" : "audit", "aria-labelledby": "audit-title" },
    heads,
    el(
      "p",
      { class: alone ? "intro" : "lead" },
      `Each ${what} of a training ${thing.slice(0, -1)} is compared with what the network’s kernel machine says of it `,
      "when it has not seen it. Where the others speak against it, it is a suspect; a person decides."
    ),
    A.warnings.map((words) =>
      el("p", { class: "caution", role: "note" }, el("strong", {}, "Caution: "), words)
    ),
    figures(),
    el(
      "div",
      { class: "card" },
      el("h2", { class: "small" }, "What was found"),
      el(
        "ul",
        { class: "sentences", id: "audit-words" },
        A.words.map((words) => el("li", {}, words))
      ),
      choiceOf()
    )
  );
}
