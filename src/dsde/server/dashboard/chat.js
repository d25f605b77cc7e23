// The same message twice, with speculation and without, and how fast each was.

import { TokenText } from "./rows.js";
import { events, key, problem } from "./stream.js";

const EXAMPLES = ["Why is the sky blue?", "Count from one to twenty.", "Write a Python function that reverses a list."];
const SEED = 1; // with a seed, sampled texts are the same with and without speculation

class Pane {
  constructor(element) {
    this.mode = element.dataset.speculation;
    this.text = new TokenText(element.querySelector(".text"));
    this.speed = element.querySelector(".speed output");
    this.bar = element.querySelector(".bar");
    this.element = element;
    this.clear();
  }

  clear() {
    this.text.clear();
    Object.assign(this, { id: null, answer: "", rate: null, numShown: 0, pieces: [], frames: [], first: null, last: null });
    this.show(null, 1);
  }

  show(rate, fastest) {
    this.speed.value = rate === null ? "–" : rate.toFixed(1);
    this.bar.style.width = rate === null ? "0" : `${(100 * rate) / fastest}%`;
  }

  /** Take over from the request's row what it has gained. */
  follow(row) {
    if (row.numPieces === this.numShown) return;
    const isNew = this.numShown === 0 || row.numPieces < this.numShown; // or the connection was lost meanwhile
    const fresh = row.pieces.slice(isNew ? 0 : this.numShown - row.numPieces);
    if (isNew) {
      this.text.clear();
      this.pieces = [];
      this.frames = [];
    }
    this.numShown = row.numPieces;
    this.pieces.push(...fresh);
    const now = performance.now();
    this.frames.push([now - (this.first ?? now), this.pieces.length]);
    this.text.add(fresh);
  }
}

export class Chat {
  constructor(form, section, rows, announce) {
    Object.assign(this, { form, rows, announce, controller: null });
    this.note = section.querySelector("#chat-note");
    this.message = form.querySelector("#message");
    this.buttons = Object.fromEntries(["send", "stop", "replay"].map((id) => [id, form.querySelector(`#${id}`)]));
    this.panes = [...section.querySelectorAll(".pane")].map((element) => new Pane(element));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#compare();
    });
    this.message.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.buttons.stop.addEventListener("click", () => this.controller?.abort());
    this.buttons.replay.addEventListener("click", () => this.#replay());
    for (const example of EXAMPLES) this.#offer(example);
  }

  /** A frame has arrived: the pane that is being answered follows its row. */
  follow({ num_running }) {
    const pane = this.current;
    this.shared ||= num_running > 1;
    const row = pane?.id && this.rows.get(pane.id);
    if (!row) return;
    pane.follow(row);
    if (row.rate !== null) this.#rate(pane, row.rate);
  }

  #offer(example) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = example;
    button.addEventListener("click", () => {
      this.message.value = example;
      this.form.requestSubmit();
    });
    this.form.querySelector("#examples").append(button);
  }

  async #compare() {
    if (this.controller) return;
    this.controller = new AbortController();
    this.shared = false;
    this.#busy(true);
    for (const pane of this.panes) pane.clear();
    this.panes[0].element.parentElement.hidden = false;
    const body = {
      messages: [{ role: "user", content: this.message.value }],
      max_completion_tokens: this.form.querySelector("#max-tokens").valueAsNumber,
      temperature: this.form.querySelector("#temperature").valueAsNumber,
      seed: SEED,
      stream: true,
      stream_options: { include_usage: true },
    };
    try {
      for (const pane of this.panes) {
        this.note.textContent = `Answering with speculation ${pane.mode}…`;
        await this.#answer(pane, body, this.controller.signal);
      }
      this.#conclude();
    } catch (error) {
      this.note.textContent = error.name === "AbortError" ? "Stopped." : error.message;
    }
    this.controller = this.current = null;
    this.#busy(false);
  }

  async #answer(pane, body, signal) {
    this.current = pane;
    pane.element.classList.add("is-answering");
    try {
      const response = await fetch("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json", ...key.headers() },
        body: JSON.stringify({ ...body, speculation: pane.mode }),
        signal,
      });
      if (!response.ok) throw new Error(await problem(response));
      let numTokens = 0;
      for await (const chunk of events(response)) {
        if (chunk.error) throw new Error(chunk.error.message);
        pane.id ??= `${chunk.id.replace("chatcmpl-", "")}-0/0`; // first prompt, first completion
        numTokens = chunk.usage?.completion_tokens ?? numTokens;
        this.#take(pane, chunk.choices?.[0]?.delta?.content);
      }
      // The first token came out of the prompt: what follows is decoding.
      if (numTokens > 1) this.#rate(pane, (1000 * (numTokens - 1)) / (pane.last - pane.first));
      await this.#settle(pane);
    } finally {
      pane.element.classList.remove("is-answering");
    }
  }

  #take(pane, content) {
    if (!content) return;
    pane.first ??= performance.now();
    pane.last = performance.now();
    pane.answer += content;
    if (!this.rows.get(pane.id)) pane.text.plain(pane.answer); // more requests run than have rows
  }

  /** The last frame may come after the answer. */
  async #settle(pane) {
    for (let i = 0; i < 20 && this.rows.get(pane.id)?.ended === null; i++) {
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
    const row = this.rows.get(pane.id);
    if (row) pane.follow(row);
  }

  #rate(pane, rate) {
    pane.rate = rate;
    const fastest = Math.max(...this.panes.map((p) => p.rate ?? 0));
    for (const one of this.panes) one.show(one.rate, fastest);
  }

  #conclude() {
    const [on, off] = this.panes;
    const same = on.answer === off.answer ? "The two texts are identical." : "The two texts differ.";
    const faster = on.rate && off.rate ? `${(on.rate / off.rate).toFixed(2)} times as fast with speculation. ` : "";
    this.note.textContent = faster + same + (this.shared ? " Other requests ran beside them." : "");
    this.announce(`Both answers are complete. ${this.note.textContent}`);
    this.buttons.replay.hidden = !(on.frames.length && off.frames.length);
  }

  #busy(busy) {
    this.buttons.send.disabled = busy;
    this.buttons.stop.hidden = !busy;
    if (busy) this.buttons.replay.hidden = true;
  }

  /** Both answers again from the start, at the speed they had. */
  #replay() {
    const start = performance.now();
    for (const pane of this.panes) {
      pane.text.clear();
      pane.numReplayed = 0;
    }
    const draw = (now) => {
      if (this.controller) return;
      let running = false;
      for (const pane of this.panes) {
        const due = pane.frames.filter(([time]) => time <= now - start).at(-1)?.[1] ?? 0;
        if (due > pane.numReplayed) pane.text.add(pane.pieces.slice(pane.numReplayed, due));
        pane.numReplayed = Math.max(due, pane.numReplayed);
        running ||= pane.numReplayed < pane.pieces.length;
      }
      if (running) requestAnimationFrame(draw);
    };
    requestAnimationFrame(draw);
  }
}
