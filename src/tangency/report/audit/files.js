// Files: decisions as JSON or CSV, for tg.auditing.apply, the labels that come of them, and decisions read back.

// ---- CSV ------------------------------------------------------------------------------------------------------------

// Characters of a cell, and bytes of a file, that are read.
const [LONGEST, MOST] = [131_072, 2 ** 28];
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$/;
// What a spreadsheet would take for a formula gets a ' in front, and so does what begins with one: then one ' is
// always ours, and whoever reads it back takes it away.
const FORMULA = /^['\t\r\n]|^\s*[=+\-@＝＋－＠]/;

const guarded = (text) => (FORMULA.test(text) && !NUMBER.test(text) ? `'${text}` : text);
const bare = (text) => (text.startsWith("'") ? text.slice(1) : text);

// `guard`: for people who open it in a spreadsheet; what programs read is exact.
function csv(rows, guard) {
  const cell = (value) => {
    const text = typeof value === "number" ? String(value) : guard ? guarded(value) : value;
    return /[",\r\n]|^\s|\s$/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const text = `${rows.map((cells) => cells.map(cell).join(",")).join("\r\n")}\r\n`;
  return guard ? `\ufeff${text}` : text; // the mark at the start tells Excel that it is UTF-8
}

// Rows of cells, as many in each as in the first; text that two readers could take for two things is refused.
function parsedCsv(text) {
  const rows = [[]];
  let [cell, quoted, closed] = ["", false, false];
  const end = () => {
    if (cell.length > LONGEST) throw new Refused(`row ${count(rows.length)} has a cell of ${count(cell.length)} characters`);
    rows[rows.length - 1].push(cell);
    [cell, closed] = ["", false];
  };
  for (let k = text.startsWith("\ufeff") ? 1 : 0; k < text.length; k++) {
    const c = text[k];
    if (quoted) {
      if (c !== '"') cell += c;
      else if (text[k + 1] === '"') cell += text[++k];
      else [quoted, closed] = [false, true];
    } else if (c === '"' && !cell && !closed) quoted = true;
    else if (closed && !",\r\n".includes(c)) throw new Refused(`row ${count(rows.length)} goes on after a closing "`);
    else if (c === ",") end();
    else if (c === "\n" || c === "\r") {
      if (c === "\r" && text[k + 1] === "\n") k++;
      end();
      rows.push([]);
    } else cell += c;
  }
  if (quoted) throw new Refused('a " is not closed in it');
  end();
  const [head, ...lines] = rows.filter((cells) => cells.length > 1 || cells[0]);
  if (!head) throw new Refused("it is empty");
  const twice = head.find((key, k) => head.indexOf(key) < k);
  if (twice !== undefined) throw new Refused(`two of its columns are called ${brief(twice)}`);
  const odd = lines.findIndex((cells) => cells.length !== head.length);
  if (odd >= 0)
    throw new Refused(`row ${count(odd + 2)} has ${plural(lines[odd].length, "cell")} and the first one ${head.length}`);
  return [head, ...lines];
}

// ---- written --------------------------------------------------------------------------------------------------------

const inOrder = () => [...decided].sort((a, b) => a[0] - b[0]);

function decisionsJson() {
  const decisions = inOrder().map(([sample, d]) => ({
    sample,
    action: d.action,
    ...(d.action === "fix" && { label: exactName(d.label) }),
  }));
  const whole = { tangency_audit: A.version, samples: A.samples, data: A.about, decisions };
  return `${JSON.stringify(whole, null, 1)}\n`;
}

const short = (value) => (missing(value) ? "" : Number(value.toPrecision(6)));

function decisionsCsv() {
  const rows = inOrder().map(([sample, d]) => {
    const at = RANK.get(sample);
    const target = A.real && at !== undefined ? Array.from(row(S.targets, at), short).join(" ") : "";
    return [
      sample,
      exactId(sample),
      A.real ? target : exactName(GIVEN[sample]),
      d.action,
      d.action === "fix" ? exactName(d.label) : "",
      at === undefined ? "" : short(WRONG[at]),
      at === undefined ? "" : short(MARGIN[at]),
      A.audited, // in every row, which is then about these data wherever it goes
    ];
  });
  return csv([["sample", "id", "given", "action", "label", "probability", "margin", "audited"], ...rows], true);
}

// Every training sample that is not dropped, with the label that it has now: as `tangency audit apply` writes them.
function cleanedCsv() {
  const id = (value) => (A.ids ? [value] : []);
  const rows = [["sample", ...id("id"), "label"]];
  GIVEN.forEach((k, sample) => {
    const d = decided.get(sample);
    if (d?.action !== "drop") rows.push([sample, ...id(exactId(sample)), exactName(d?.action === "fix" ? d.label : k)]);
  });
  return csv(rows, false);
}

function download(file, kind, text) {
  const url = URL.createObjectURL(new Blob([text], { type: `${kind};charset=utf-8` }));
  const link = el("a", { href: url, download: file, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// ---- read -----------------------------------------------------------------------------------------------------------

class Refused extends Error {}

// A stranger's file may be called anything: what cannot be seen, or turns the line around, is shown by its number.
const shownName = (text) =>
  text.replace(/[\p{Cc}\p{Cf}\p{Cs}]/gu, (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

// A value of a stranger's file in a few words.
function brief(value) {
  const text = typeof value === "object" && value !== null ? "a list or an object" : String(value ?? "nothing");
  return shownName(text.length > 60 ? `${text.slice(0, 60)}…` : text);
}

const NAMES = new Map(A.classes.map((_, k) => [exactName(k), k]));
const classOf = (text) => NAMES.get(bare(text)) ?? NAMES.get(text);

function fromJson(text) {
  let said;
  try {
    said = JSON.parse(text);
  } catch {
    throw new Refused("it is neither JSON nor CSV that this page has written");
  }
  if (said?.tangency_audit !== A.version || !Array.isArray(said.decisions))
    throw new Refused("it holds no decisions of an audit");
  requireSame(said.samples, said.data);
  return said.decisions.map((d) => ({ sample: d?.sample, action: d?.action, label: NAMES.get(d?.label) }));
}

// Refuse decisions about other data than this page's.
function requireSame(samples, about) {
  if (samples !== A.samples)
    throw new Refused(`it is about other data: ${brief(samples)} samples; this page is about ${count(A.samples)}`);
  // Samples without names may be those that had some.
  const nameless = (key) => key === "ids" && (A.about.ids === null || (about?.ids ?? null) === null);
  const other = Object.keys(A.about).filter((key) => about?.[key] !== A.about[key] && !nameless(key));
  if (other.length) throw new Refused(`it is about other data: the ${other.join(" and the ")} are not those of this page`);
}

// What a cell of the column "audited" says, as JSON has it.
function unstamped(cell) {
  const said = Object.fromEntries(
    cell.split("; ").map((part) => [part.split(" ", 1)[0], part.slice(part.indexOf(" ") + 1)])
  );
  if (said.audit !== String(A.version) || !/^\d{1,15}$/.test(said.samples ?? ""))
    throw new Refused(`its column audited says ${brief(cell)}, which is no data`);
  for (const key of Object.keys(said)) if (said[key] === "-") said[key] = null;
  return [Number(said.samples), said];
}

function fromCsv(text) {
  const [head, ...rows] = parsedCsv(text);
  const column = (key) => head.indexOf(key);
  const lacking = ["sample", "given", "action", "label", "audited"].filter((key) => column(key) < 0);
  if (lacking.length) throw new Refused(`it has no column ${lacking.join(", ")}`);
  for (const audited of new Set(rows.map((cells) => cells[column("audited")]))) requireSame(...unstamped(audited));
  return rows.map((cells) => {
    const [sample, before, action, label, id] = ["sample", "given", "action", "label", "id"].map(
      (key) => cells[column(key)] ?? ""
    );
    const number = /^\d+$/.test(sample) ? Number(sample) : NaN;
    if (!A.real && number < A.samples && classOf(before) !== GIVEN[number])
      throw new Refused(
        `it is about other data: sample ${number} was “${brief(before)}” there and is “${name(GIVEN[number])}” here`
      );
    const called = number < A.samples ? exactId(number) : "";
    if (id && called && id !== called && bare(id) !== called)
      throw new Refused(`it is about other data: sample ${number} was called “${brief(id)}” there and is “${called}” here`);
    return { sample: number, action, label: classOf(label) };
  });
}

// The decisions of a file, [[sample, {action, label}], …]; refuses a file of which one decision does not fit.
function readDecisions(text) {
  const found = /^\ufeff?\s*[{[]/.test(text) ? fromJson(text) : fromCsv(text);
  const seen = new Set();
  for (const { sample } of found) {
    if (seen.has(sample)) throw new Refused(`sample ${brief(sample)} is in it twice`);
    seen.add(sample);
  }
  return found.map(({ sample, action, label }) => {
    if (!isDecision(sample, action, label))
      throw new Refused(`a decision in it does not fit: sample ${brief(sample)}, ${brief(action)}`);
    return [sample, action === "fix" ? { action, label } : { action }];
  });
}

// ---- the row of buttons ---------------------------------------------------------------------------------------------

// A file of decisions is chosen and read; what came of it is said in `said`.
function reader(said) {
  const read = async () => {
    const [file] = input.files;
    if (!file) return;
    try {
      if (file.size > MOST) throw new Refused(`it has ${count(file.size)} bytes, which no file of this page has`);
      const text = await file.text().catch(() => {
        throw new Refused("the browser cannot read it");
      });
      const found = readDecisions(text);
      decide(found);
      said.textContent = `${plural(found.length, "decision")} read from ${shownName(file.name)}.`;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      said.textContent = `${shownName(file.name)} was refused: ${error.message}.`;
    }
    input.value = "";
    change({ changes: state.changes + 1 });
  };
  const input = el("input", { type: "file", accept: ".json,.csv", id: "import", class: "hidden", onchange: read });
  return el("label", { class: "button", title: "JSON or CSV that this page has written" }, "Read decisions…", input);
}

function files() {
  const said = el("p", { class: "caption", id: "file-said", role: "status" });
  const writer = (id, words, title, file, kind, make) => {
    const write = () => {
      download(file, kind, make());
      unsaved = false;
      said.textContent = `${file} was written, with ${plural(decided.size, "decision")}.`;
    };
    return el("button", { type: "button", id: `export-${id}`, title, onclick: write }, words);
  };
  const memory = el("p", { class: "caption", id: "memory" });
  watch(["changes"], () => {
    memory.textContent = kept
      ? "This browser remembers what you decide. A file takes it elsewhere."
      : "This browser does not let the page remember: write a file before you close it, and read it back later.";
    memory.classList.toggle("strong", !kept);
  });
  const [json, table] = ["as tg.auditing.apply reads them", "for a spreadsheet; tg.auditing.apply reads it too"];
  const how = A.real
    ? "Targets are real numbers: the files list what is kept and what is dropped, by sample number."
    : [
        "In Python: ",
        el("code", {}, 'clean = tg.auditing.apply(train, "decisions.json")'),
        ". In the CSV of decisions, text that a spreadsheet would take for a formula has a ' in front; cleaned labels " +
          "are as they are in the data.",
      ];
  return el(
    "div",
    { class: "card files" },
    el("h3", {}, "Take the decisions with you"),
    el(
      "div",
      { class: "buttons" },
      writer("json", "Decisions, JSON", json, "decisions.json", "application/json", decisionsJson),
      writer("csv", "Decisions, CSV", table, "decisions.csv", "text/csv", decisionsCsv),
      !A.real &&
        writer("labels", "Cleaned labels, CSV", "all that are kept, with their labels", "labels.csv", "text/csv", cleanedCsv),
      reader(said)
    ),
    said,
    memory,
    el("p", { class: "caption" }, how)
  );
}
