// The sections of the page in their order, the bar above them, and the start of it all.

// `there`: whether there is something to show; without it, always. A new section is a line here, and a file of its own.
const SECTIONS = [
  { id: "overview", words: "Overview", make: hero },
  { id: "faithful", words: "Faithful?", make: faithful },
  { id: "why", words: "Decisions", make: explorer },
  { id: "kernel", words: "Kernel matrix", make: kernelItself },
].filter((part) => !part.there || part.there());

function bar() {
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
  const links = [...SECTIONS, { id: "foot", words: "About" }];
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
    el("div", { class: "which" }, el("span", {}, "Kernel"), views),
    theme()
  );
}

async function start() {
  await decode();
  bar();
  by("main").append(...SECTIONS.map((part) => part.make()));
  foot();
  Object.assign(state, recall());
  for (const { draw } of watchers) draw();
  if (location.hash.includes("sample=")) by("why").scrollIntoView();
  addEventListener("keydown", pressed);
  addEventListener("hashchange", () => {
    const next = recall();
    if (Object.keys(next).length) explore(next);
  });
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
