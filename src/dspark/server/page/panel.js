// The figures beside the conversation: of the answer that streams, or of one chosen later.

import { number } from "./answer.js";
import { Lanes } from "./lanes.js";
import { Strip } from "./strip.js";

const $ = (id) => document.getElementById(id);

export class Panel {
  constructor() {
    this.answer = null;
    this.plain = null; // measured by the server at its start; null without a drafter
    this.strip = new Strip($("strip"), $("readout"), (round) => this.answer?.mark(round));
    this.lanes = new Lanes($("lanes"), $("timeline"), $("model-idle"), $("drafter-idle"));
  }

  serve({ plain_tokens_per_second: plain, drafter }) {
    this.plain = plain;
    this.drafter = drafter;
    $("plain-row").hidden = plain === null;
    this.refresh();
  }

  // Says where the figure for plain decoding comes from.
  #explain(here) {
    const own = "This answer: its tokens behind the first one, by the time of their rounds.";
    if (this.plain === null) return `${own} The server runs without a drafter, so this is plain decoding.`;
    if (here !== null) {
      return `${own} Plain decoding: the median of this answer’s own rounds in which nothing was guessed.`;
    }
    return (
      `${own} Plain decoding: measured when the server started, on this machine, with the same model and without ` +
      `the drafter (${this.drafter}), for one text with a short prompt. Other users of the server, or of the ` +
      "machine, slow this answer and not that measurement."
    );
  }

  // Show another answer's rounds.
  show(answer) {
    this.answer?.mark(null);
    this.answer = answer;
    this.strip.clear();
    answer?.rounds.forEach((round) => this.strip.add(round));
    this.lanes.show(answer?.spans ?? []);
    this.refresh();
  }

  add(round) {
    this.strip.add(round);
    this.lanes.show(this.answer.spans);
    this.refresh();
  }

  refresh() {
    const { rate = null, plain: here = null, length = null, acceptance = null, rounds = [] } = this.answer ?? {};
    const plain = this.plain === null ? null : (here ?? this.plain);
    const most = Math.max(rate ?? 0, plain ?? 0) || 1;
    $("speed-note").textContent = this.#explain(here);
    $("plain").textContent = number(plain);
    $("rate").textContent = number(rate);
    $("rate-bar").setAttribute("width", ((rate ?? 0) / most) * 100);
    $("plain-bar").setAttribute("width", ((plain ?? 0) / most) * 100);
    const ratio = rate && plain ? rate / plain : null;
    $("ratio").hidden = ratio === null;
    $("times").textContent = `${number(ratio, 2)}×`;
    $("length").textContent = number(length, 2);
    $("acceptance").textContent = acceptance === null ? "–" : `${Math.round(acceptance * 100)} %`;
    $("rounds").textContent = rounds.length || "–";
    if (rounds.length) {
      this.strip.describe(`${rounds.length} rounds, ${number(length, 2)} tokens each in the mean. Arrow keys step.`);
    }
  }
}
