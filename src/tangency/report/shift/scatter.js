// Both sets in two components: samples, contours of their densities, and the density of each component beside.

// Components whose samples the file carries, from 0, and a sample's place along one of them.
const SHOWN_COMPONENTS = D.shown;
const along = (set, component) => row(POINTS[set].z, SHOWN_COMPONENTS.indexOf(component));
const TIGHT = [0.9, 0.6, 0.3];

function planeChart(size, cx, cy, hover) {
  const room = Math.round(Math.min(96, 0.2 * size)); // of the densities at the sides
  const height = Math.round(Math.min(size, 560));
  const box = { left: 44, right: size - room - 6, top: room + 6, bottom: height - 42 };
  const z = Object.fromEntries(SIDES.map((set) => [set, [along(set, cx), along(set, cy)]]));
  const range = [0, 1].map((k) => {
    const all = SIDES.flatMap((set) => Array.from(z[set][k]));
    const [low, high] = [Math.min(...all), Math.max(...all)];
    const pad = 0.07 * (high - low) || 1;
    return [low - pad, high + pad];
  });
  const sx = linear(...range[0], box.left, box.right);
  const sy = linear(...range[1], box.bottom, box.top);
  const [xs, ys] = range.map((r) => spaced(...r));
  const px = linear(0, GRID - 1, box.left, box.right);
  const py = linear(0, GRID - 1, box.bottom, box.top);
  const lines = Object.fromEntries(SIDES.map((set) => [set, [densityLine(z[set][0], xs), densityLine(z[set][1], ys)]]));
  const most = [0, 1].map((k) => Math.max(...SIDES.flatMap((set) => lines[set][k])) || 1);
  const up = linear(0, most[0], box.top - 8, 4);
  const out = linear(0, most[1], box.right + 8, size - 4);
  const closed = (points) => `M${points.map((p) => p.map((v) => v.toFixed(1)).join(" ")).join("L")}Z`;
  const marks = (set) =>
    Array.from(z[set][0], (v, k) => {
      const [x, y, r] = [sx(v), sy(z[set][1][k]), 2.6];
      return set === "train"
        ? `M${(x - r).toFixed(1)} ${y.toFixed(1)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`
        : `M${x.toFixed(1)} ${(y - r - 0.6).toFixed(1)}l${r + 0.6} ${r + 0.6}l${-r - 0.6} ${r + 0.6}l${-r - 0.6} ${-r - 0.6}Z`;
    }).join("");
  const ring = svg("circle", { r: 7, class: "ring", visibility: "hidden" });
  const node = frame(
    size,
    height,
    `Components ${cx + 1} and ${cy + 1} of both sets, with contours of their densities`,
    bottom(
      ticks(...range[0], (box.right - box.left) / 74).map((t) => ({ x: sx(t), words: num(t, 2) })),
      box.bottom,
      box.top
    ),
    left(
      ticks(...range[1], (box.bottom - box.top) / 56).map((t) => ({ y: sy(t), words: num(t, 2) })),
      box.left,
      box.right
    ),
    SIDES.map((set) => svg("path", { d: marks(set), class: `dots ${LETTER[set]}` })),
    SIDES.map((set) => {
      const heights = densityPlane(...z[set], xs, ys);
      const d = levelsOf(heights, TIGHT).map((level) => contour(heights, level, px, py));
      return svg("path", { d: d.join(""), class: `contour ${LETTER[set]}` });
    }),
    SIDES.map((set) => [
      svg("path", {
        d: closed([[box.left, box.top - 8], ...lines[set][0].map((v, k) => [px(k), up(v)]), [box.right, box.top - 8]]),
        class: `hill ${LETTER[set]}`,
      }),
      svg("path", {
        d: closed([
          [box.right + 8, box.bottom],
          ...lines[set][1].map((v, k) => [out(v), py(k)]),
          [box.right + 8, box.top],
        ]),
        class: `hill ${LETTER[set]}`,
      }),
    ]),
    label((box.left + box.right) / 2, height - 6, `component ${cx + 1}`, { "text-anchor": "middle", class: "axis" }),
    svg(
      "text",
      {
        transform: `translate(12 ${(box.top + box.bottom) / 2}) rotate(-90)`,
        "text-anchor": "middle",
        class: "axis",
      },
      `component ${cy + 1}`
    ),
    ring
  );
  // The sample that is nearest to the pointer, if any is near.
  const near = (event) => {
    const at = node.getBoundingClientRect();
    const [x, y] = [event.clientX - at.left, event.clientY - at.top];
    let best = { far: 15 ** 2 };
    for (const set of SIDES)
      for (let k = 0; k < z[set][0].length; k++) {
        const far = (sx(z[set][0][k]) - x) ** 2 + (sy(z[set][1][k]) - y) ** 2;
        if (far < best.far) best = { far, set, k, x: sx(z[set][0][k]), y: sy(z[set][1][k]) };
      }
    return best.set ? best : null;
  };
  node.addEventListener("pointermove", (event) => {
    const found = near(event);
    ring.setAttribute("visibility", found ? "visible" : "hidden");
    if (found) {
      ring.setAttribute("cx", found.x);
      ring.setAttribute("cy", found.y);
    }
    hover(found);
  });
  node.addEventListener("pointerleave", () => {
    ring.setAttribute("visibility", "hidden");
    hover(null);
  });
  node.addEventListener("click", (event) => {
    const found = near(event);
    if (found) openSample(found.set, drawn(found), ratioOf(found));
  });
  return node;
}

const drawn = ({ set, k }) => array(POINTS[set].drawn)[k];
const ratioOf = ({ set, k }) => likelier(array(POINTS[set].ratio)[k]);

function plane() {
  const room = el("div", { class: "chart plane", id: "plane" });
  const tip = el("div", { class: "tip", hidden: true });
  const hover = (found) => {
    tip.hidden = !found;
    if (!found) return;
    const sample = drawn(found);
    tip.replaceChildren(
      PICTURES ? picture(found.set, PLACES[found.set].get(sample), null) : "",
      el(
        "span",
        {},
        el("strong", {}, `${SIDE[found.set]} #${sample}`),
        LOOK.kind === "texts" ? ` ${text(found.set, PLACES[found.set].get(sample)).slice(0, 110)}` : "",
        el("br", {}),
        ratioOf(found)
      )
    );
    const wide = room.clientWidth;
    tip.style.left = `${Math.max(0, Math.min(found.x + 12, wide - tip.offsetWidth - 4))}px`;
    tip.style.top = `${found.y + 14}px`;
  };
  const draw = () => {
    tip.hidden = true;
    room.replaceChildren(planeChart(room.clientWidth || 640, state.x, state.y, hover), tip);
  };
  sized(room, draw);
  watch(["x", "y"], draw);
  const chooser = (axis, title) => {
    const node = el(
      "select",
      { "aria-label": title, id: `axis-${axis}`, onchange: () => change({ [axis]: Number(node.value) }) },
      SHOWN_COMPONENTS.map((k) =>
        el(
          "option",
          { value: k, selected: k === state[axis] },
          `component ${k + 1}${differs(C.p[k]) ? `: ${num(C.distance[k], 2)} apart` : ""}`
        )
      )
    );
    watch([axis], () => (node.value = String(state[axis])));
    return el("label", {}, el("span", {}, title), node);
  };
  const cut = SIDES.filter((set) => POINTS[set].drawn.shape[0] < POINTS[set].count);
  return section(
    "picture",
    "Both sets as the network sees them",
    "Each sample in two principal components of the layer’s output; around the plane the density of each component.",
    el(
      "div",
      { class: "card" },
      el(
        "div",
        { class: "row" },
        el("p", { class: "key" }, SIDES.map((set) => key(`side-${LETTER[set]}`, `${SIDE[set]} (${ROLE[set]})`))),
        SHOWN_COMPONENTS.length > 2 && el("div", { class: "selects axes" }, chooser("x", "across"), chooser("y", "up"))
      ),
      room,
      el(
        "p",
        { class: "caption" },
        "Contours hold 30, 60 and 90 % of a set by a kernel density estimate. ",
        cut.map((set) => `${count(POINTS[set].drawn.shape[0])} of ${count(POINTS[set].count)} ${SIDE[set]} samples. `),
        `${TOUCH ? "Tap" : "Point at or click"} a sample to see it.`
      )
    )
  );
}
