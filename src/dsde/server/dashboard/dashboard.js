// Puts the page together: frames come in, parts are told, and what a screen reader should hear is said now and then.

import { BatchChart, ThroughputChart } from "./charts.js";
import { Chat } from "./chat.js";
import { Rows } from "./rows.js";
import { Feed, key } from "./stream.js";

const SAMPLE_MS = 500;
const NUM_SAMPLES = 120;
const SAY_MS = 15000;
const find = (id) => document.getElementById(id);

const rows = new Rows({ running: find("running"), ended: find("ended") }, find("row-template"), (running, ended) => {
  find("empty").hidden = running > 0;
  find("ended-title").hidden = ended === 0;
});
const chat = new Chat(find("chat"), document.querySelector(".try"), rows, announce);
const throughputChart = new ThroughputChart(find("throughput-plot"), NUM_SAMPLES);
const batchChart = new BatchChart(find("batch-plot"));
const samples = [];
const recent = []; // the last steps in which a row drafted something
let latest = null;
let said = "";

/** For screen readers. Added rather than replaced, so that nothing is lost while something else is being read. */
function announce(text) {
  const line = document.createElement("p");
  line.textContent = text;
  find("announcer").append(line);
  while (find("announcer").childElementCount > 3) find("announcer").firstElementChild.remove();
}

const feed = new Feed({
  onState(state, text) {
    find("connection").dataset.state = state;
    find("connection").textContent = text;
  },
  onFrame(frame) {
    latest = frame;
    rows.apply(frame);
    chat.follow(frame);
    if (frame.about) find("about").textContent = `${frame.about.model} · ${frame.about.policy}`;
    if (frame.num_dropped) find("connection").textContent = `Live, ${frame.num_dropped} frames dropped`;
    const numHidden = frame.num_running - find("running").childElementCount;
    find("more").hidden = numHidden <= 0;
    find("more").textContent = `${numHidden} more are running than are shown here.`;
    showBatch(frame);
    showRates(frame);
  },
  askKey(problem) {
    const dialog = find("key-dialog");
    find("key-problem").textContent = problem;
    dialog.showModal();
    return new Promise((resolve) => {
      find("key-form").onsubmit = (event) => {
        event.preventDefault();
        key.set(find("key").value);
        dialog.close();
        resolve();
      };
      dialog.oncancel = (event) => event.preventDefault();
    });
  },
});

function showBatch({ batch, num_running, num_waiting, rows: updates }) {
  for (const { points } of updates) recent.push(...points.filter((point) => point.drafted));
  recent.splice(0, recent.length - 60);
  const sum = (name) => recent.reduce((total, point) => total + point[name], 0);
  batchChart.draw(batch);
  find("num-running").textContent = num_running;
  find("num-waiting").textContent = num_waiting;
  find("cap").textContent = batch.cap ?? "–";
  find("acceptance").textContent = sum("drafted") ? `${Math.round((100 * sum("accepted")) / sum("drafted"))} %` : "–";
  find("per-step").textContent = recent.length ? (1 + sum("accepted") / recent.length).toFixed(2) : "–";
}

function showRates({ throughput, num_running }) {
  document.body.classList.toggle("is-idle", num_running === 0);
  if (!throughput) return;
  const fastest = Math.max(throughput.with, throughput.without);
  const ratio = throughput.with / throughput.without;
  find("ratio").value = `${ratio.toFixed(2)}×`;
  find("ratio").dataset.pays = ratio >= 1;
  for (const kind of ["with", "without"]) {
    const part = document.querySelector(`.rates [data-kind="${kind}"]`);
    part.querySelector("output").value = throughput[kind].toFixed(throughput[kind] < 100 ? 1 : 0);
    part.querySelector(".bar").style.width = `${(100 * throughput[kind]) / fastest}%`;
  }
}

function sample() {
  if (find("pause").getAttribute("aria-pressed") === "true") return;
  samples.push(latest?.num_running ? latest.throughput : null);
  samples.splice(0, samples.length - NUM_SAMPLES);
  const most = Math.max(1, ...samples.flatMap((s) => (s ? [s.with, s.without] : [])));
  throughputChart.draw(samples, most * 1.1);
  find("throughput-scale").textContent = most > 1 ? `up to ${most.toFixed(0)} tokens/s` : "";
}

function say() {
  if (!latest) return;
  const { num_running, throughput } = latest;
  const speed = throughput ? `, ${throughput.with.toFixed(0)} tokens a second, ${find("ratio").value} plain decoding` : "";
  const text = num_running ? `${num_running} running${speed}.` : "Nothing is running.";
  if (text !== said) announce(text);
  said = text;
}

find("pause").addEventListener("click", ({ currentTarget: button }) => {
  const paused = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", paused);
  if (paused) feed.stop();
  else feed.start();
  if (paused) find("connection").textContent = "Paused";
  find("connection").dataset.state = paused ? "paused" : "live";
});

// A page that nobody sees costs the server nothing.
document.addEventListener("visibilitychange", () => {
  if (find("pause").getAttribute("aria-pressed") === "true") return;
  if (document.hidden) feed.stop();
  else feed.start();
});

setInterval(sample, SAMPLE_MS);
setInterval(say, SAY_MS);
feed.start();
