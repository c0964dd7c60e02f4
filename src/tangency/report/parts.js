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
