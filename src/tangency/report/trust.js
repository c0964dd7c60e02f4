// What τ of the chosen kernel means: in words, and on an axis beside what chance and a second network have.

const WORD_OF = { closely: "good", "in part": "fair", hardly: "poor" };

const word = (view) => el("b", { class: `tag word ${WORD_OF[view.verdict.word]}` }, view.verdict.word);

function trust() {
  const title = el("h2", { class: "small" });
  const said = el("p", { class: "meaning", id: "meaning" });
  const room = el("div", { class: "axis-room" });
  const against = el("ul", { class: "against" });
  watch(["view"], () => {
    const view = VIEWS[state.view];
    const [first, ...rest] = view.verdict.sentence.split(". ");
    title.replaceChildren("How far can it be trusted? ", el("span", { class: "on" }, view.name), " ", word(view));
    said.replaceChildren(el("strong", {}, `${first}. `), rest.join(". "));
    room.replaceChildren(...trustAxis(view));
    against.replaceChildren(...view.verdict.against.map((line) => el("li", {}, line)));
  });
  return el(
    "div",
    { class: "card trust", id: "verdict" },
    title,
    said,
    room,
    against,
    el("p", { class: "caption" }, N.words.rule, " These bounds are a convention of ours, not a law.")
  );
}

// τ with its interval on an axis from the least there is to 1; a band is what shuffled labels have.
function trustAxis(view) {
  const { tau, intervals } = view.faithful;
  const ends = intervals.tau || [];
  const second = N.second && N.second.tau;
  const low = Math.min(-0.2, ...[tau, ends[0], view.chance && view.chance[0], second].filter((v) => !missing(v)));
  const scale = linear(low, 1, 0, 100);
  const at = (v) => `${scale(Math.min(1, v)).toFixed(2)}%`;
  const wide = (a, b) => ({ left: at(a), width: `${(scale(b) - scale(a)).toFixed(2)}%` });
  const bounds = [0, N.words["in part"], N.words.closely, 1];
  const key = (kind, words) => el("span", {}, el("i", { class: `swatch ${kind}` }), words);
  return [
    el(
      "div",
      { class: "axis-line", "aria-hidden": "true" },
      view.chance && el("span", { class: "chance", style: wide(...view.chance) }),
      bounds.map((v) => el("i", { class: "bound", style: { left: at(v) } })),
      !missing(ends[0]) && el("span", { class: "reach", style: wide(...ends) }),
      !missing(second) && el("span", { class: "second", style: { left: at(second) } }),
      !missing(tau) && el("span", { class: "mark", style: { left: at(tau) } }),
      bounds.map((v) => el("small", { style: { left: at(v) } }, num(v, 1)))
    ),
    el(
      "p",
      { class: "key", "aria-hidden": "true" },
      key("tau", [`${view.name}, τ `, num(tau, 2)]),
      view.chance && key("chance", "shuffled labels"),
      !missing(second) && key("second", "a second network")
    ),
  ];
}
