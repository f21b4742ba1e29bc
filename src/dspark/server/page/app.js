// The conversation: what is asked, what streams back, and the settings it is asked with.

import { Answer, question } from "./answer.js";
import { Panel } from "./panel.js";
import { ApiError, chat, info } from "./stream.js";

const $ = (id) => document.getElementById(id);
const REMEMBERED = ["system", "temperature", "max-tokens", "seed", "effort"];
const LOADING = 503;
const NO_KEY = 401;
const NEAR = 80; // pixels from the end within which the view follows the text

const panel = new Panel();
let messages = [];
let running = null; // the AbortController of the answer that streams
const answers = new Map(); // list item -> Answer

// -- settings --------------------------------------------------------------------------------------

function remember() {
  for (const id of REMEMBERED) localStorage.setItem(`dspark-${id}`, $(id).value);
  for (const id of ["show-colours", "show-rejected"]) localStorage.setItem(`dspark-${id}`, $(id).checked);
  sessionStorage.setItem("dspark-key", $("key").value);
}

function recall() {
  for (const id of REMEMBERED) $(id).value = localStorage.getItem(`dspark-${id}`) ?? $(id).value;
  for (const id of ["show-colours", "show-rejected"]) {
    const kept = localStorage.getItem(`dspark-${id}`);
    if (kept !== null) $(id).checked = kept === "true";
  }
  $("key").value = sessionStorage.getItem("dspark-key") ?? "";
  paint();
}

function paint() {
  document.body.classList.toggle("plain-text", !$("show-colours").checked);
  document.body.classList.toggle("with-rejected", $("show-rejected").checked);
}

function settings() {
  const system = $("system").value.trim();
  const chosen = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: $("temperature").valueAsNumber,
    max_tokens: $("max-tokens").valueAsNumber,
    seed: $("seed").valueAsNumber,
  };
  if (!$("effort-row").hidden) chosen.reasoning_effort = $("effort").value;
  for (const name of ["temperature", "max_tokens", "seed"]) {
    if (Number.isNaN(chosen[name])) delete chosen[name]; // empty: the server's default
  }
  return chosen;
}

function askForKey(message) {
  $("key-row").hidden = false;
  $("key-note").textContent = message;
  if (!$("settings").open) $("settings").showModal();
  $("key").focus();
}

// -- the server ------------------------------------------------------------------------------------

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

function status(state, text) {
  $("status").dataset.state = state;
  $("model").textContent = text;
}

async function connect() {
  while (true) {
    try {
      const found = await info($("key").value);
      panel.serve(found);
      $("effort-row").hidden = !found.reasons;
      const drafter = found.drafter === "none" ? "no drafter" : `drafter ${found.drafter}`;
      status("ready", `${found.model} · ${drafter}`);
      document.title = `dspark · ${found.model}`;
      return;
    } catch (error) {
      if (error.status === NO_KEY) {
        status("waiting", "this server wants a key");
        const given = $("key").value !== "";
        askForKey(given ? "The server does not know this key." : "This server wants one. It stays in this tab.");
        return;
      }
      const loading = error.status === LOADING;
      status(loading ? "loading" : "lost", loading ? "the model is loading" : "the server does not answer");
    }
    await pause(1000);
  }
}

// -- a turn ----------------------------------------------------------------------------------------

function follow(act) {
  const view = $("conversation");
  const near = view.scrollHeight - view.scrollTop - view.clientHeight < NEAR;
  act();
  if (near) view.scrollTop = view.scrollHeight;
}

function busy(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  $("conversation").setAttribute("aria-busy", controller !== null);
}

async function ask(text) {
  const answer = new Answer();
  answers.set(answer.item, answer);
  const turns = messages; // a new chat has a list of its own
  turns.push({ role: "user", content: text });
  $("empty").hidden = true;
  $("log").append(question(text), answer.item);
  $("conversation").scrollTop = $("conversation").scrollHeight;
  panel.show(answer);
  const controller = new AbortController();
  busy(controller);
  $("announce").textContent = "The answer begins.";
  let how = "";
  try {
    for await (const message of chat(settings(), $("key").value, controller.signal)) {
      if (message.dspark) {
        follow(() => answer.add(message.dspark));
        if (panel.answer === answer && message.dspark.round) panel.add(answer.rounds.at(-1));
      }
      const rest = message.choices?.[0]?.delta.content;
      if (rest && !message.dspark) follow(() => answer.close(rest));
      if (message.choices?.[0]?.finish_reason === "length") how = "longest answer reached";
      if (message.metrics) answer.final = message.metrics;
    }
  } catch (error) {
    if (controller.signal.aborted) how = "stopped";
    else {
      follow(() => answer.fail(error instanceof ApiError ? error.message : "the server does not answer"));
      if (error.status === NO_KEY) askForKey("The server does not know this key.");
    }
  }
  if (running === controller) busy(null);
  if (answer.tokens) follow(() => answer.end(how));
  // A turn without an answer is taken back: the next question shall not follow it.
  if (answer.text) turns.push({ role: "assistant", content: answer.text });
  else turns.pop();
  if (panel.answer === answer) panel.refresh();
  $("announce").textContent = answer.text || "No answer.";
}

function reset() {
  running?.abort();
  messages = [];
  answers.clear();
  $("log").replaceChildren();
  $("empty").hidden = false;
  panel.show(null);
  $("question").focus();
}

function submit() {
  const text = $("question").value.trim();
  if (!text || running) return;
  $("question").value = "";
  grow();
  ask(text);
}

function grow() {
  const area = $("question");
  area.rows = 1;
  while (area.scrollHeight > area.clientHeight && area.rows < 8) area.rows += 1;
}

// -- what people do --------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("question").addEventListener("input", grow);
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) running?.abort();
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("question").focus();
});
$("reset").addEventListener("click", reset);
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("close", () => {
  remember();
  if (!$("key-row").hidden) connect();
});
for (const id of ["show-colours", "show-rejected"]) {
  $(id).addEventListener("change", () => {
    paint();
    remember();
  });
}
$("suggestions").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button && !running) ask(button.textContent);
});
$("log").addEventListener("pointerover", (event) => {
  const round = event.target.dataset?.round;
  const answer = answers.get(event.target.closest("li"));
  if (answer && answer === panel.answer) panel.strip.select(round === undefined ? null : Number(round));
});
$("log").addEventListener("pointerleave", () => panel.strip.select(null));
for (const kind of ["click", "focusin"]) {
  $("log").addEventListener(kind, (event) => {
    const answer = answers.get(event.target.closest("li"));
    if (answer && answer !== panel.answer) panel.show(answer);
  });
}

recall();
connect();
