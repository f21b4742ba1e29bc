// What both lanes did: the model's passes above, the drafter's work below, on one axis of time.

const SVG = "http://www.w3.org/2000/svg";
const KEPT_MS = 10_000; // of the newest spans, which bounds what an answer remembers
const MOST = 400; // and so many spans
const PASS = 40; // pixels of a usual pass
const WIDEST = 16_000; // pixels of the whole drawing
const ROW = 18;
const BAR = 14;

const passes = (spans) => spans.filter((s) => s.kind === "verify");
const drafts = (spans) => spans.filter((s) => s.kind !== "verify");

// `spans` with later ones behind them, without what is old.
export function newest(spans, later) {
  const all = [...spans, ...later];
  const end = Math.max(...all.map((s) => s.end_ms));
  return all.filter((s) => s.end_ms > end - KEPT_MS).slice(-MOST);
}

function extent(spans) {
  return [Math.min(...spans.map((s) => s.start_ms)), Math.max(...spans.map((s) => s.end_ms))];
}

// Share of the time from `begin` to `end` in which a lane did nothing.
function idle(lane, begin, end) {
  let busy = 0;
  let reached = begin;
  for (const s of [...lane].sort((a, b) => a.start_ms - b.start_ms)) {
    busy += Math.max(s.end_ms - Math.max(s.start_ms, reached), 0);
    reached = Math.max(reached, s.end_ms);
  }
  return end > begin ? 1 - busy / (end - begin) : 0;
}

const percent = (share) => `${Math.round(share * 100)} %`;

export class Lanes {
  // `section` is hidden while there is nothing to draw into `host`.
  constructor(section, host, model, drafter) {
    Object.assign(this, { section, host, model, drafter });
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("height", 2 * ROW);
    host.replaceChildren(this.svg);
    this.spans = [];
    this.waiting = false;
  }

  // Draws before the next frame: rounds may come faster than those.
  show(spans) {
    this.spans = spans;
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.#draw();
    });
  }

  #draw() {
    const spans = this.spans;
    this.section.hidden = !passes(spans).length;
    if (this.section.hidden) return;
    const [begin, end] = extent(spans);
    const lengths = passes(spans).map((s) => s.end_ms - s.start_ms);
    const usual = lengths.sort((a, b) => a - b)[lengths.length >> 1];
    const scale = Math.min(PASS / usual, WIDEST / (end - begin));
    const atEnd = this.host.scrollLeft + this.host.clientWidth >= this.host.scrollWidth - PASS;
    this.svg.setAttribute("width", Math.ceil((end - begin) * scale));
    this.svg.replaceChildren(...spans.map((s) => this.#bar(s, begin, scale)));
    if (atEnd) this.host.scrollLeft = this.host.scrollWidth;
    const [model, drafter] = [passes(spans), drafts(spans)].map((lane) => percent(idle(lane, begin, end)));
    this.model.textContent = model;
    this.drafter.textContent = drafter;
    const seconds = ((end - begin) / 1000).toFixed(1);
    this.host.setAttribute(
      "aria-label",
      `Two lanes during ${seconds} seconds: the model is idle for ${model} of them, the drafter for ${drafter}.`,
    );
  }

  // A draft that was not made ahead is lower, one that was made in vain is hollow.
  #bar(span, begin, scale) {
    const bar = document.createElementNS(SVG, "rect");
    const height = span.kind === "fresh" ? BAR / 2 : BAR;
    const top = span.kind === "verify" ? 0 : ROW;
    bar.setAttribute("class", span.kind);
    bar.setAttribute("x", (span.start_ms - begin) * scale);
    bar.setAttribute("y", top + (ROW + BAR) / 2 - height);
    bar.setAttribute("width", Math.max((span.end_ms - span.start_ms) * scale - 1, 1));
    bar.setAttribute("height", height);
    bar.setAttribute("rx", 2);
    return bar;
  }
}
