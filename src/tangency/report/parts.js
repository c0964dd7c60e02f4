// What all sections are made of.

// The sections in their order: {id, words for the bar or null, make}. Each part of the page adds its own.
const SECTIONS = [];
const TOOLS = []; // each makes something that stands in the bar beside the links

const section = (id, title, lead, ...children) =>
  el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    lead && el("p", { class: "lead" }, lead),
    children
  );

const card = (title, value, note, attributes) =>
  el(
    attributes?.onclick ? "button" : "div",
    { class: "card figure", type: attributes?.onclick ? "button" : null, ...attributes },
    el("span", { class: "what" }, title),
    el("span", { class: "big" }, value),
    el("span", { class: "note" }, note)
  );

const tag = (kind, words, title) => el("span", { class: `tag ${kind}`, title }, words);

// An entry of a chart’s key.
const key = (kind, words) => el("span", {}, el("i", { class: `swatch ${kind}` }), words);

// Rows of a table beside a sample's own, column by column. `own`: {words, values}; `lines`: [{kind, head, values}].
function comparedRows(label, own, lines) {
  const line = ({ kind, head, values }) =>
    el(
      "tr",
      { class: kind },
      el("th", { scope: "row" }, head),
      Array.from(values, (v) => el("td", {}, num(v, 3)))
    );
  return el(
    "div",
    { class: "wide", tabindex: 0, role: "region", "aria-label": label },
    el(
      "table",
      { class: "cells across" },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col" }, "training sample"),
          LOOK.columns.map((c) => el("th", { scope: "col", title: c }, c))
        )
      ),
      el("tbody", {}, line({ kind: "own", head: own.words, values: own.values }), lines.map(line))
    )
  );
}

// A window over the page. `make(leave)`: what stands in it; `leave(then)` is a click that closes it first.
function openWindow(title, label, make) {
  const leave = (then) => () => {
    dialog.close();
    then?.();
  };
  const dialog = el(
    "dialog",
    {
      class: "training",
      "aria-label": label,
      onclose: () => dialog.remove(),
      onclick: (event) => event.target === dialog && dialog.close(),
    },
    el(
      "div",
      { class: "inside" },
      el(
        "div",
        { class: "row" },
        el("h3", {}, title),
        el("button", { type: "button", class: "icon", "aria-label": "Close", onclick: leave() }, "✕")
      ),
      make(leave)
    )
  );
  document.body.append(dialog);
  dialog.showModal();
}
