// The requests: each with its text, its curves and the reason for its last length.

import { LengthChart, SignalChart } from "./charts.js";

const MOST_POINTS = 60;
const MOST_PIECES = 800;
const MOST_SPANS = 400;
const MOST_ENDED = 4;
const STEPS_STRUCK = 3; // rejected tokens of so many steps stay readable; of older ones a tick remains
const NAMES = {
  mean_kld: "KLD",
  scale_factor: "SF",
  wvir: "WVIR",
  outlook: "outlook",
  gain_of_next: "next",
  cost_of_pass: "price",
};
const LOGARITHMIC = new Set(["scale_factor"]); // e to twice the KLD: 0.1 and 5000 are neighbours

/** Text whose tokens tell where they came from. */
export class TokenText {
  constructor(element) {
    this.element = element;
    this.clear();
  }

  clear() {
    this.element.replaceChildren();
    this.struck = []; // steps whose rejected tokens are shown: [spans]
    this.open = null; // spans of the rejected tokens that are being added
  }

  add(pieces) {
    const { element } = this;
    const atEnd = element.scrollHeight - element.scrollTop - element.clientHeight < 24;
    for (const [kind, content] of pieces) this.#append(kind, content);
    while (element.childElementCount > MOST_SPANS) element.firstElementChild.remove();
    if (atEnd) this.toEnd();
  }

  toEnd() {
    this.element.scrollTop = this.element.scrollHeight;
  }

  plain(text) {
    this.element.textContent = text;
  }

  #append(kind, content) {
    if (kind === "num_rejected") {
      this.element.append(tick(content));
      return;
    }
    if (content === "") return;
    const span = this.#span(kind, kind === "rejected" ? content.replaceAll("\n", "⏎") : content);
    if (kind !== "rejected") {
      this.open = null;
      return;
    }
    if (!this.open) {
      this.open = [];
      this.struck.push(this.open);
      if (this.struck.length > STEPS_STRUCK) this.#fold(this.struck.shift());
    }
    this.open.push(span);
  }

  #span(kind, content) {
    const span = document.createElement(kind === "rejected" ? "del" : "span");
    span.className = kind;
    span.textContent = content;
    return this.element.appendChild(span);
  }

  #fold(spans) {
    const [first, ...others] = spans;
    for (const span of others) span.remove();
    first.replaceWith(tick(spans.length));
  }
}

/** A mark as high as many tokens were rejected. */
function tick(count) {
  const mark = document.createElement("span");
  mark.className = "tick";
  mark.style.height = `${Math.min(3 + 2 * count, 18)}px`;
  mark.title = count === 1 ? "1 drafted token was rejected here" : `${count} drafted tokens were rejected here`;
  return mark;
}

class Row {
  constructor(item, update) {
    this.item = item;
    this.id = update.id;
    const find = (name) => item.querySelector(name);
    this.parts = Object.fromEntries(["h3", ".mode", ".count", ".rate", ".ended", ".why", ".curves"].map((n) => [n, find(n)]));
    this.text = new TokenText(find(".text"));
    this.begin(update);
  }

  begin(update) {
    this.pieces = [];
    this.numPieces = 0; // so far; the first of them may be gone
    this.points = [];
    this.maxTokens = update.max_tokens;
    this.text.clear();
    const title = update.prompt || "(token ids)";
    this.parts.h3.textContent = title;
    this.parts.h3.title = title;
    this.text.element.setAttribute("aria-label", `Answer to: ${title}`);
    const mode = update.speculation;
    this.parts[".mode"].textContent = mode === "on" ? "adaptive" : mode === "off" ? "no speculation" : `fixed at ${mode}`;
    this.item.dataset.speculation = mode === "off" ? "off" : "on";
    this.strips = null;
    this.parts[".curves"].replaceChildren();
  }

  update(update) {
    this.pieces.push(...update.pieces);
    this.numPieces += update.pieces.length;
    this.pieces.splice(0, this.pieces.length - MOST_PIECES);
    this.points.push(...update.points);
    this.points.splice(0, this.points.length - MOST_POINTS);
    Object.assign(this, { numTokens: update.num_tokens, rate: update.rate, ended: update.ended, why: update.why });
    this.text.add(update.pieces);
    this.parts[".count"].textContent = `${update.num_tokens} of ${this.maxTokens} tokens`;
    this.parts[".rate"].textContent = update.rate === null ? "" : `${update.rate.toFixed(1)} tokens/s`;
    this.parts[".ended"].textContent = ENDED[update.ended] ?? "";
    this.parts[".why"].textContent = update.why;
    this.item.classList.toggle("has-ended", update.ended !== null);
    this.#draw();
  }

  #draw() {
    const last = this.points.at(-1);
    if (!last) return;
    this.strips ??= this.#strips(last);
    const values = [];
    for (const strip of this.strips) {
      const value = strip.draw(this.points);
      strip.value.textContent = value;
      values.push(`${strip.name} ${value}`);
    }
    this.parts[".curves"].setAttribute("aria-label", `The last ${this.points.length} steps. Now: ${values.join(", ")}.`);
  }

  #strips(point) {
    const figure = this.parts[".curves"];
    const strip = (name, kind) => {
      const box = figure.appendChild(document.createElement("div"));
      box.className = `strip ${kind}`;
      const [label, plot, value] = ["label", "plot", "value"].map((part) => {
        const element = box.appendChild(document.createElement("span"));
        element.className = part;
        return element;
      });
      label.textContent = name;
      return { name, plot, value };
    };
    const length = strip("length", "lengths");
    const chart = new LengthChart(length.plot, MOST_POINTS);
    length.draw = (points) => {
      chart.draw(points, Math.max(4, ...points.map((p) => p.drafted)));
      return String(points.at(-1).drafted);
    };
    const known = Object.keys(NAMES).filter((name) => name in point.signals);
    const names = known.length ? known : Object.keys(point.signals).slice(0, 3);
    return [length, ...names.map((name) => this.#signal(strip(NAMES[name] ?? name, "signal"), name))];
  }

  #signal(strip, name) {
    const chart = new SignalChart(strip.plot, MOST_POINTS);
    const scale = LOGARITHMIC.has(name) ? (value) => Math.log1p(value) : (value) => value;
    strip.draw = (points) => {
      const values = points.map((point) => point.signals[name] ?? null);
      chart.draw(values.map((value) => (value === null ? null : scale(value))));
      return short(values.at(-1));
    };
    return strip;
  }
}

const ENDED = { stop: "finished", length: "finished: length reached", abort: "left early" };

const short = (value) => {
  if (value === null) return "–";
  if (Math.abs(value) >= 1000) return value.toExponential(0).replace("e+", "e");
  return value.toFixed(Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2);
};

export class Rows {
  /** `lists`: of those that run and of those that have ended. */
  constructor(lists, template, onCount) {
    Object.assign(this, { lists, template, onCount, rows: new Map() });
  }

  get(id) {
    return this.rows.get(id);
  }

  apply(frame) {
    const gone = frame.whole ? [...this.rows.keys()].filter((id) => !frame.rows.some((r) => r.id === id)) : frame.removed;
    for (const id of gone) this.#remove(id);
    for (const update of frame.rows) this.#apply(update);
    const ended = [...this.rows.values()].filter((row) => row.ended !== null);
    for (const row of ended.slice(0, -MOST_ENDED)) this.#remove(row.id);
    this.onCount(this.lists.running.childElementCount, this.lists.ended.childElementCount);
  }

  #remove(id) {
    this.rows.get(id)?.item.remove();
    this.rows.delete(id);
  }

  #apply(update) {
    let row = this.rows.get(update.id);
    if (!row) {
      const item = this.template.content.cloneNode(true).firstElementChild;
      row = new Row(item, update);
      this.rows.set(update.id, row);
    } else if ("prompt" in update) {
      row.begin(update);
    }
    row.update(update);
    const list = row.ended === null ? this.lists.running : this.lists.ended;
    if (row.item.parentElement !== list) {
      list.prepend(row.item);
      row.text.toEnd();
    }
  }
}
