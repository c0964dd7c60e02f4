// Light and dark, chosen by the system or by hand.

const MEMORY = "tangency-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

// A browser may refuse to remember (private windows, some file pages); then the choice lasts as long as the page.
function remembered(value) {
  try {
    if (value) localStorage.setItem(MEMORY, value);
    return localStorage.getItem(MEMORY);
  } catch {
    return null;
  }
}

function theme() {
  const root = document.documentElement;
  const button = el("button", { type: "button", class: "icon", id: "theme" });
  const now = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const show = () => {
    const other = now() === "dark" ? "light" : "dark";
    button.textContent = other === "dark" ? "☾" : "☀";
    button.title = `Switch to ${other}`;
    button.setAttribute("aria-label", button.title);
  };
  const before = remembered();
  if (before === "dark" || before === "light") root.dataset.theme = before;
  button.addEventListener("click", () => {
    root.dataset.theme = now() === "dark" ? "light" : "dark";
    remembered(root.dataset.theme);
    show();
  });
  dark.addEventListener("change", show);
  show();
  return button;
}
