// One answer: its text, token by token, and what its rounds came to.

import { newest } from "./lanes.js";

const FEW = 5;

function element(name, className, text) {
  const found = document.createElement(name);
  if (className) found.className = className;
  if (text !== undefined) found.textContent = text;
  return found;
}

export const number = (value, digits = 1) =>
  value === null || value === undefined || !Number.isFinite(value) ? "–" : value.toFixed(digits);

const spent = (r) => r.draft_ms + r.verify_ms + r.other_ms;

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

export function question(text) {
  const item = element("li", "question");
  item.append(element("span", "hidden", "You: "), element("p", "", text));
  return item;
}

export class Answer {
  constructor() {
    this.item = element("li", "answer");
    this.item.tabIndex = 0; // chosen by the keyboard, too, it shows its rounds
    this.body = element("p", "text waiting");
    this.note = element("p", "note");
    this.item.append(element("span", "hidden", "Model: "), this.body, this.note);
    this.thought = null; // the text of its reasoning, folded away once the answer begins
    this.rounds = [];
    this.spans = []; // what both lanes did, where there are two
    this.text = "";
    this.tokens = 0;
    this.ms = 0;
    this.final = null;
  }

  // What one message of the stream brought.
  add({ tokens, round, lanes }) {
    this.body.classList.remove("waiting");
    const number = round ? this.rounds.length : -1;
    let place = this.body;
    const put = (token) => {
      for (const [text, thought] of [[token.reasoning, true], [token.text, false]]) {
        if (!text) continue;
        place = thought ? this.#thought() : this.#said();
        const found = element("span", token.drafted ? "t a" : "t o", text);
        if (round) found.dataset.round = number;
        place.append(found);
      }
    };
    const accepted = tokens.filter((t) => t.drafted);
    const own = tokens.filter((t) => !t.drafted);
    if (this.thought && !this.text) place = this.thought;
    accepted.forEach(put);
    if (round) {
      // Where a text ends among accepted guesses, nobody judged those behind its end.
      const judged = own.length ? round.verified : round.accepted;
      for (const text of round.draft.slice(round.accepted, judged)) {
        const guess = element("del", "rejected", text.replaceAll("\n", "⏎"));
        guess.dataset.round = number;
        place.append(guess);
      }
      this.rounds.push({ ...round, judged, emitted: tokens.length });
      this.ms += spent(round);
    }
    own.forEach(put);
    if (lanes) this.spans = newest(this.spans, lanes);
    this.tokens += tokens.length;
    this.text += tokens.map((t) => t.text).join("");
  }

  // Text that came without a round, at the end.
  close(text) {
    this.#said().append(text);
    this.text += text;
  }

  #thought() {
    if (!this.thought) {
      const fold = element("details", "thought");
      fold.open = true;
      this.thought = element("p", "text");
      fold.append(element("summary", "", "Reasoning"), this.thought);
      this.body.before(fold);
    }
    return this.thought;
  }

  #said() {
    if (this.thought && !this.text) this.thought.parentElement.open = false;
    return this.body;
  }

  // Tokens behind the first one by the time of their rounds; the server's own figure at the end.
  get rate() {
    if (this.final) return this.final.tokens_per_second;
    return this.ms ? (this.#inRounds() / this.ms) * 1000 : null;
  }

  // A round that guessed nothing is plain decoding, measured right here; null below FEW of them.
  get plain() {
    const plain = this.rounds.filter((r) => !r.draft.length).map(spent);
    return plain.length < FEW ? null : 1000 / median(plain);
  }

  get length() {
    return this.rounds.length ? this.#inRounds() / this.rounds.length : null;
  }

  get acceptance() {
    const verified = this.rounds.reduce((sum, r) => sum + r.verified, 0);
    const accepted = this.rounds.reduce((sum, r) => sum + r.accepted, 0);
    return verified ? accepted / verified : null;
  }

  #inRounds() {
    return this.rounds.reduce((sum, r) => sum + r.emitted, 0);
  }

  end(how) {
    this.body.classList.remove("waiting");
    const parts = [`${this.tokens} tokens`];
    if (this.rate) parts.push(`${number(this.rate)} tok/s`);
    if (this.length) parts.push(`${number(this.length)} a round`);
    if (how) parts.push(how);
    this.note.textContent = parts.join(" · ");
  }

  fail(message) {
    this.body.classList.remove("waiting");
    const error = element("p", "error", message);
    error.setAttribute("role", "alert");
    this.item.append(error);
  }

  // Light up the tokens of one round; null lights none.
  mark(round) {
    for (const lit of this.item.querySelectorAll(".lit")) lit.classList.remove("lit");
    if (round === null) return;
    for (const token of this.item.querySelectorAll(`[data-round="${round}"]`)) token.classList.add("lit");
  }
}
