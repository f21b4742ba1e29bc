// The rounds of one answer as columns of cells, newest on the right.

const SVG = "http://www.w3.org/2000/svg";
const CELL = 9;
const STEP = 12;

export class Strip {
  // `onRound` hears of the round that is pointed at or stepped to, or null.
  constructor(host, readout, onRound) {
    this.host = host;
    this.readout = readout;
    this.onRound = onRound;
    this.svg = document.createElementNS(SVG, "svg");
    host.replaceChildren(this.svg);
    this.clear();
    host.addEventListener("pointermove", (e) => this.select(this.#at(e)));
    host.addEventListener("pointerleave", () => this.select(null));
    host.addEventListener("blur", () => this.select(null));
    host.addEventListener("keydown", (e) => this.#step(e));
  }

  clear() {
    this.rounds = [];
    this.selected = null;
    this.tallest = 6;
    this.svg.replaceChildren();
    this.#resize();
    this.host.setAttribute("aria-label", "No rounds yet");
    this.readout.textContent = "Each round of the answer will stand here.";
  }

  add(round) {
    const column = document.createElementNS(SVG, "g");
    const own = round.emitted - round.accepted;
    const kinds = [
      ...Array(round.accepted).fill("accepted"),
      ...Array(own).fill("own"),
      ...Array(round.judged - round.accepted).fill("rejected"),
      ...Array(round.draft.length - round.judged).fill("unchecked"),
    ];
    kinds.forEach((kind, i) => {
      const cell = document.createElementNS(SVG, "rect");
      cell.setAttribute("class", kind);
      cell.setAttribute("x", this.rounds.length * STEP + 1);
      cell.setAttribute("y", -(i + 1) * STEP + 1);
      cell.setAttribute("width", CELL);
      cell.setAttribute("height", CELL);
      cell.setAttribute("rx", 2);
      column.append(cell);
    });
    const atEnd = this.host.scrollLeft + this.host.clientWidth >= this.host.scrollWidth - STEP;
    this.svg.append(column);
    this.rounds.push(round);
    this.tallest = Math.max(this.tallest, kinds.length);
    this.#resize();
    if (atEnd) this.host.scrollLeft = this.host.scrollWidth;
    if (this.selected === null) this.#say(round, this.rounds.length - 1);
  }

  // What assistive technology reads of the drawing, once it is complete.
  describe(text) {
    this.host.setAttribute("aria-label", text);
  }

  select(index) {
    if (index === this.selected) return;
    this.svg.children[this.selected]?.classList.remove("lit");
    this.selected = index;
    this.onRound(index);
    if (index === null) return;
    this.svg.children[index].classList.add("lit");
    this.#say(this.rounds[index], index);
  }

  #say(round, index) {
    const counts = round.draft.length
      ? `${round.draft.length} guessed, ${round.verified} checked, ${round.accepted} accepted`
      : "nothing guessed";
    const times = [round.draft_ms, round.verify_ms, round.other_ms].map((ms) => ms.toFixed(1));
    this.readout.textContent =
      `Round ${index + 1}: ${counts} · guess ${times[0]} + check ${times[1]} + rest ${times[2]} ms`;
  }

  #resize() {
    const width = Math.max(this.rounds.length * STEP, 1);
    const height = this.tallest * STEP;
    this.svg.setAttribute("viewBox", `0 ${-height} ${width} ${height}`);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
  }

  #at(event) {
    const { left, width } = this.svg.getBoundingClientRect(); // a phone's drawing is scaled
    const index = Math.floor(((event.clientX - left) / width) * this.rounds.length);
    return index >= 0 && index < this.rounds.length ? index : null;
  }

  #step(event) {
    const last = this.rounds.length - 1;
    const now = this.selected;
    const to = {
      ArrowLeft: now === null ? last : Math.max(now - 1, 0),
      ArrowRight: now === null ? last : Math.min(now + 1, last),
      Home: 0,
      End: last,
    }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.select(to);
    this.host.scrollLeft = to * STEP - this.host.clientWidth / 2;
  }
}
