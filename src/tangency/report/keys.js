// Keys. Each part of the page adds its own: {room: its section, acts: {key: act}}.

const KEYS = [];

// How many pixels of a section can be seen.
function inSight(id) {
  const box = by(id).getBoundingClientRect();
  return Math.max(0, Math.min(box.bottom, innerHeight) - Math.max(box.top, 0));
}

// Where two parts of the page know a key, it is for the one of which more can be seen.
function acting(key) {
  const knowing = KEYS.filter((part) => part.acts[key]);
  const seen = knowing.map((part) => (knowing.length > 1 ? inSight(part.room) : 0));
  return knowing[seen.indexOf(Math.max(...seen))]?.acts[key];
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.closest("input, select, textarea");
  if (event.key === "Escape" && typing) {
    typing.blur();
    if (typing.type === "search" && typing.value) {
      typing.value = "";
      typing.dispatchEvent(new Event("input"));
    }
    return;
  }
  if (typing) return;
  // Inside what scrolls sideways the arrows scroll.
  if (event.key.startsWith("Arrow") && event.target.closest(".wide")) return;
  const act = acting(event.key);
  if (!act) return;
  event.preventDefault();
  act();
}
