// A strip of samples of which one is chosen. Entries are made as the strip is scrolled, and kept.

const BATCH = 150; // entries that are made at once

// `found()`: the samples listed now; `at()`: the chosen one; `entry(at)` makes its button; `nothing()`: what else to say.
function strip(id, label, { found, at: chosen, entry, nothing }) {
  const made = new Map();
  const node = el("div", { class: `strip ${LOOK.kind}`, id, role: "group", "aria-label": label });
  const get = (at) => made.get(at) || made.set(at, entry(at)).get(at);
  let many = BATCH;
  // What stays is not touched: a list that loses one entry loses one button.
  const fill = () => {
    const current = found();
    const wanted = current.length ? current.slice(0, many).map(get) : [nothing()];
    const kept = new Set(wanted);
    for (const child of [...node.children]) if (!kept.has(child)) child.remove();
    let next = node.firstChild;
    for (const child of wanted)
      if (child === next) next = next.nextSibling;
      else node.insertBefore(child, next);
  };
  const mark = () => {
    const place = found().indexOf(chosen());
    if (place >= many) {
      many = place + BATCH;
      fill();
    }
    for (const old of node.querySelectorAll("[aria-current]")) {
      old.removeAttribute("aria-current");
      old.tabIndex = -1;
    }
    if (place < 0) return;
    const button = get(chosen());
    button.setAttribute("aria-current", "true");
    button.tabIndex = 0;
    // Not scrollIntoView: that would scroll the page as well.
    const [a, b] = [node.getBoundingClientRect(), button.getBoundingClientRect()];
    if (b.top < a.top || b.bottom > a.bottom) node.scrollTop += b.top - a.top - (a.height - b.height) / 2;
    if (b.left < a.left || b.right > a.right) node.scrollLeft += b.left - a.left - (a.width - b.width) / 2;
  };
  node.addEventListener("scroll", () => {
    const near =
      node.scrollHeight - node.scrollTop - node.clientHeight < 300 &&
      node.scrollWidth - node.scrollLeft - node.clientWidth < 300;
    if (near && many < found().length) {
      many += BATCH;
      fill();
    }
  });
  // A new list: begins with its first entries, unless `stay`.
  node.renew = (stay = false) => {
    if (!stay) many = BATCH;
    fill();
    mark();
  };
  node.mark = mark;
  node.made = (at) => made.get(at);
  return node;
}
