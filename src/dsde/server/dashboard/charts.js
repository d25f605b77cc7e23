// Small SVG charts. Each draws all of what it is given; none keeps data.

const NS = "http://www.w3.org/2000/svg";

function make(parent, name, attributes = {}) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return parent.appendChild(element);
}

/** An SVG that fills its parent: drawn in units of its own, stretched by the browser. */
function canvas(parent, width, height) {
  return make(parent, "svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
}

const round = (value) => Math.round(value * 100) / 100;

/** A path through [x, y] points; null breaks it. */
function line(points) {
  let pen = "M";
  let path = "";
  for (const point of points) {
    if (point === null) {
      pen = "M";
    } else {
      path += `${pen}${round(point[0])} ${round(point[1])}`;
      pen = "L";
    }
  }
  return path;
}

const box = (x, y, width, height) => `M${round(x)} ${round(y)}h${round(width)}v${round(height)}h${round(-width)}z`;

/** The length of the last steps: what was accepted of it filled, what was rejected hollow, and its outline. */
export class LengthChart {
  constructor(parent, count) {
    this.count = count;
    this.svg = canvas(parent, 2 * count, 100);
    this.accepted = make(this.svg, "path", { class: "fill-accepted" });
    this.rejected = make(this.svg, "path", { class: "fill-rejected" });
    this.length = make(this.svg, "path", { class: "line-length" });
    this.cap = make(this.svg, "path", { class: "line-cap" });
  }

  draw(points, most) {
    const y = (value) => 100 - (96 * value) / most;
    const first = this.count - points.length;
    const [length, cap] = [[], []];
    const parts = { accepted: "", rejected: "" };
    points.forEach((point, i) => {
      const x = 2 * (first + i);
      parts.accepted += point.accepted ? box(x, y(point.accepted), 2, 100 - y(point.accepted)) : "";
      const gone = point.drafted - point.accepted;
      parts.rejected += gone ? box(x, y(point.drafted), 2, y(point.accepted) - y(point.drafted)) : "";
      length.push([x, y(point.drafted)], [x + 2, y(point.drafted)]);
      if (point.cap === null) cap.push(null);
      else cap.push([x, y(Math.min(point.cap, most))], [x + 2, y(Math.min(point.cap, most))]);
    });
    this.accepted.setAttribute("d", parts.accepted);
    this.rejected.setAttribute("d", parts.rejected);
    this.length.setAttribute("d", line(length));
    this.cap.setAttribute("d", line(cap));
  }
}

/** One signal over the same steps. */
export class SignalChart {
  constructor(parent, count) {
    this.count = count;
    this.svg = canvas(parent, 2 * count, 100);
    this.path = make(this.svg, "path", { class: "line-signal" });
  }

  draw(values) {
    const known = values.filter((value) => value !== null);
    const most = Math.max(...known, 1e-6);
    const first = this.count - values.length;
    const at = (value, i) => (value === null ? null : [2 * (first + i) + 1, 94 - (88 * value) / most]);
    this.path.setAttribute("d", line(values.map(at)));
  }
}

/** Tokens per second with and without speculation, oldest first; null where nothing ran. */
export class ThroughputChart {
  constructor(parent, count) {
    this.count = count;
    this.svg = canvas(parent, count, 100);
    this.gain = make(this.svg, "path", { class: "fill-gain" });
    this.without = make(this.svg, "path", { class: "line-without" });
    this.with = make(this.svg, "path", { class: "line-with" });
  }

  draw(samples, most) {
    const first = this.count - samples.length;
    const points = (kind) =>
      samples.map((sample, i) => (sample ? [first + i + 1, 98 - (94 * sample[kind]) / most] : null));
    this.with.setAttribute("d", line(points("with")));
    this.without.setAttribute("d", line(points("without")));
    const floor = points("without");
    const gain = points("with").map((p, i) => (p ? [[p[0], Math.min(p[1], floor[i][1])], floor[i]] : null));
    this.gain.setAttribute("d", areas(gain));
  }
}

/** Closed shapes between pairs of points, one for every run without null. */
function areas(pairs) {
  let path = "";
  let run = [];
  for (const pair of [...pairs, null]) {
    if (pair) {
      run.push(pair);
    } else if (run.length > 1) {
      path += `${line([...run.map((p) => p[0]), ...run.map((p) => p[1]).reverse()])}z`;
      run = [];
    } else {
      run = [];
    }
  }
  return path;
}

/** One bar for every sequence that decodes: drafted, accepted, wanted; and the cap over all of them. */
export class BatchChart {
  constructor(parent) {
    this.svg = canvas(parent, 100, 100);
    this.grid = make(this.svg, "path", { class: "line-grid" });
    this.accepted = make(this.svg, "path", { class: "fill-accepted" });
    this.rejected = make(this.svg, "path", { class: "fill-rejected" });
    this.wanted = make(this.svg, "path", { class: "line-wanted" });
    this.cap = make(this.svg, "path", { class: "line-cap" });
  }

  draw({ bars, cap }) {
    const most = Math.max(4, cap ?? 0, ...bars.map((bar) => Math.max(bar[0], bar[2] ?? 0)));
    const y = (value) => 98 - (92 * value) / most;
    const slot = 100 / Math.max(bars.length, 8);
    const heights = Array.from({ length: Math.floor(most) }, (_, i) => i + 1);
    this.grid.setAttribute("d", most <= 16 ? line(heights.flatMap((h) => [null, [0, y(h)], [100, y(h)]])) : "");
    let accepted = "";
    let rejected = "";
    const wanted = [];
    bars.forEach(([drafted, stood, predicted], i) => {
      const x = slot * i + slot * 0.15;
      const width = slot * 0.7;
      if (stood) accepted += box(x, y(stood), width, y(0) - y(stood));
      if (drafted > stood) rejected += box(x, y(drafted), width, y(stood) - y(drafted));
      if (predicted !== null) wanted.push(null, [x - slot * 0.08, y(predicted)], [x + width + slot * 0.08, y(predicted)]);
    });
    this.accepted.setAttribute("d", accepted);
    this.rejected.setAttribute("d", rejected);
    this.wanted.setAttribute("d", line(wanted));
    this.cap.setAttribute("d", cap === null ? "" : line([[0, y(cap)], [100, y(cap)]]));
  }
}
