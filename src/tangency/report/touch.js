// Fingers in place of a mouse and keys: the words that hints use, and a swipe to the next sample.

const TOUCH = matchMedia("(pointer: coarse)").matches;
const PRESS = TOUCH ? "tap" : "click";
// So many pixels sideways, and so many times as far as up or down, are a swipe; less is a tap, or scrolling.
const SWIPE = { least: 56, flat: 1.8 };

// Calls `go(1)` on a swipe to the left and `go(-1)` to the right. What scrolls sideways by itself is left alone.
function swiped(node, go) {
  let from = null;
  node.addEventListener(
    "touchstart",
    (event) => {
      const free = event.touches.length === 1 && !event.target.closest(".wide, .choice, input, select");
      from = free ? { x: event.touches[0].clientX, y: event.touches[0].clientY } : null;
    },
    { passive: true }
  );
  node.addEventListener(
    "touchend",
    (event) => {
      if (!from || !event.changedTouches.length) return;
      const [x, y] = [event.changedTouches[0].clientX - from.x, event.changedTouches[0].clientY - from.y];
      from = null;
      if (Math.abs(x) >= SWIPE.least && Math.abs(x) >= SWIPE.flat * Math.abs(y)) go(x < 0 ? 1 : -1);
    },
    { passive: true }
  );
  node.addEventListener("touchcancel", () => (from = null), { passive: true });
}
