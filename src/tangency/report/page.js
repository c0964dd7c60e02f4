// The bar, and the start of it all.

function bar() {
  const links = [...SECTIONS, { id: "foot", words: "About" }].filter((part) => part.words);
  // The address is kept for the sample, so these scroll by themselves.
  const go = (id) => (event) => {
    event.preventDefault();
    by(id).scrollIntoView({ behavior: "smooth" });
  };
  by("bar").append(
    el(
      "nav",
      { "aria-label": "Sections" },
      links.map(({ id, words }) => el("a", { href: `#${id}`, onclick: go(id) }, words))
    ),
    ...TOOLS.map((make) => make()),
    theme()
  );
}

async function start() {
  await decode();
  bar();
  by("main").append(...SECTIONS.map((part) => part.make()));
  foot();
  const said = recall();
  for (const [, next] of said) Object.assign(state, next);
  for (const { draw } of watchers) draw();
  if (said.length) by(said[0][0].room).scrollIntoView();
  addEventListener("keydown", pressed);
  addEventListener("hashchange", () => recall().forEach(([kept, next]) => kept.open(next)));
  document.documentElement.dataset.ready = "true";
}

// Without this a browser that is too old would show an empty page.
start().catch((error) => {
  by("main").append(
    el(
      "p",
      { class: "card" },
      `This page could not be drawn: ${error.message}. A browser of 2022 or later is needed.`
    )
  );
  throw error;
});
